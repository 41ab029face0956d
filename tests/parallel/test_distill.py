"""Distillation: the chunked loss against torch's own functions, and training under every layout against one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from boost.config import Config, traffic
from boost.config.architecture import IGNORED
from boost.measure.counting import CollectiveCounter
from boost.measure.exactness import made_up_batches
from boost.models.block import interleave
from boost.models.decoder import Decoder
from boost.models.fused import fused_params
from boost.models.interface import Flow, Teaching
from boost.parallel.gradients import GradientReducer, StepFlags, launch_step_stats
from boost.parallel.loss import distill_loss
from boost.parallel.mesh import Axis, Mesh, share
from boost.train.prefetch import host_batch
from boost.train.step import run_passes
from boost.train.teacher import Teacher
from tests import toy
from tests.convert.toys import save
from tests.distributed import run_distributed

SEQUENCES = 4


def by_hand(s: Tensor, t: Tensor, x: Tensor, h: Tensor, targets: Tensor, teaching: Teaching) -> Tensor:
    """The definition, with torch's own functions: logits s and t, inputs of the heads x and h."""
    w, k = teaching.weight, teaching.temperature
    counted = targets != IGNORED
    text = F.cross_entropy(s, targets, ignore_index=IGNORED, reduction="none")
    log_p, log_q = F.log_softmax(t / k, -1), F.log_softmax(s / k, -1)
    teacher = F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
    hidden = (x - h).square().mean(-1) if teaching.hidden_weight else torch.zeros(())
    return (((1 - w) * text + w * k**2 * teacher + teaching.hidden_weight * hidden) * counted).sum()


@pytest.mark.parametrize(("w", "k", "hidden"), [(1.0, 1.0, 0.0), (0.3, 2.0, 0.7), (0.0, 1.0, 0.5)])
def test_chunks_are_the_whole(monkeypatch: pytest.MonkeyPatch, w: float, k: float, hidden: float) -> None:
    monkeypatch.setattr(traffic, "CHUNK_ELEMENTS", 8 * 30)  # eight tokens per chunk
    monkeypatch.setattr(traffic, "CHUNK_TOKENS", 1)
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.double, generator=generator)

    x, head = drawn(20, 8).requires_grad_(), drawn(30, 8).requires_grad_()
    width = 8 if hidden else 5  # without hidden states, the teacher may be narrower
    h, other_head = drawn(20, width), drawn(30, width)
    targets = torch.randint(0, 30, (20,), generator=generator)
    targets[3] = IGNORED
    teaching = Teaching(h, other_head, w, k, hidden, torch.zeros((), dtype=torch.double))
    ours = distill_loss(x, head, targets, teaching, Axis())
    theirs = by_hand(x @ head.T, h @ other_head.T, x, h, targets, teaching)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
    text = F.cross_entropy(x @ head.T, targets, ignore_index=IGNORED, reduction="sum").detach()
    torch.testing.assert_close(teaching.cross_entropy, text, rtol=1e-12, atol=0)
    expected = torch.autograd.grad(theirs, (x, head), torch.tensor(0.5, dtype=torch.double))
    actual = torch.autograd.grad(ours, (x, head), torch.tensor(0.5, dtype=torch.double))
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-13)


DISTILL = {"weight": 0.6, "temperature": 1.5, "hidden": 0.4}
CELLS: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ({"family": "svd"}, {"layout": "btp", "tp": 2}, {}),
    ({"family": "cola"}, {"layout": "btp-sp", "tp": 2, "overlap": "halves"}, {"recompute": "low-rank"}),
    ({"family": "svd"}, {"layout": "btp-cp", "tp": 2}, {}),
    ({"family": "svd", "ranks": {"attn.o": 4}}, {"layout": "vanilla", "tp": 2}, {"recompute": "full-block"}),
    ({"family": "dense"}, {"layout": "megatron", "tp": 2}, {}),
    ({"family": "cola"}, {"layout": "ulysses", "tp": 2}, {}),
    ({"family": "svd"}, {"layout": "btp", "cp": 2}, {}),
    ({"family": "lax", "over": "svd"}, {"layout": "btp", "dp": 2, "shard": "full"}, {}),
]
"""(model, parallel, train) of the student; the teacher is dense."""


def whole_loss(student: Decoder, teacher: Decoder, config: Config) -> Tensor:
    """The loss of a global batch on one process, by hand."""
    total = torch.zeros((), dtype=torch.double)
    for batch in made_up_batches(toy.single(config), 0):
        tokens, targets = torch.from_numpy(batch.tokens), torch.from_numpy(batch.targets).reshape(-1)
        _, (stream,) = student._run_parts(tokens, None, ())
        flow = Flow(stream.x)
        interleave([student.layout.head_input(flow, student.final_norm)])
        x, h = flow.x, teacher.head_inputs(tokens)
        teaching = Teaching(h, teacher.head, DISTILL["weight"], DISTILL["temperature"], DISTILL["hidden"])
        total += by_hand(x @ student.head.T, h @ teacher.head.T, x, h, targets, teaching)
    return total / (config.train.global_batch * config.train.seq_len)


def against_one_process(config: Config) -> dict[str, float]:
    """Relative errors of the loss and of every gradient, and collectives of the loss beyond those without a teacher."""
    model, mesh = toy.toy_model(config)
    teacher = Teacher(config, mesh)
    params = list(fused_params(model))
    reducer = GradientReducer(params, mesh, torch.double)
    cp = mesh.cp
    made = made_up_batches(config, 0)
    each = [made[number].share(cp.rank, cp.size) for number in share(len(made), mesh.dp.rank, mesh.dp.size)]
    batches = [host_batch(batch) for batch in each]
    positions = config.train.global_batch * config.train.seq_len
    reducer.begin(len(batches))
    loss = run_passes(model, batches, config, positions, teacher)
    reducer.finish()
    targets = sum(int((batch.targets != IGNORED).sum()) for batch in each)
    text = teacher.cross_entropy / positions
    found = launch_step_stats(params, loss, targets, positions, mesh, StepFlags.NONE, text).read()
    assert found.cross_entropy is not None
    alone = toy.single(config)
    reference, _ = toy.toy_decoder(
        alone.model_copy(update={"train": config.train.model_copy(update={"recompute": "none"})})
    )
    expected = whole_loss(reference, Teacher(alone, Mesh(toy.CPU)).decoder, config)
    expected.backward()
    ours = {name: value.clone() for name, value in toy.gradients(model).items()}
    theirs = {name: value for name, value in toy.local_parts(model, toy.gradients(reference)).items() if name in ours}
    whole = [host_batch(batch) for batch in made_up_batches(alone, 0)]
    count = sum(int((batch.targets != IGNORED).sum()) for batch in whole)
    mean = float(expected.detach()) * positions / count
    text_mean = float(sum(reference(batch.tokens, batch.targets).detach() for batch in whole)) / count
    with CollectiveCounter() as plain:
        run_passes(model, batches[:1], config, positions)
    with CollectiveCounter() as of_teacher:
        teaching = teacher(batches[0].tokens, None)
    with CollectiveCounter() as both:
        run_passes(model, batches[:1], config, positions, lambda *_: teaching)
    return {
        "loss": abs(found.loss - mean) / abs(mean),
        "cross-entropy": abs(found.cross_entropy - text_mean) / text_mean,
        "gradients": toy.worst_error(ours, theirs),
        "missing": float(len(toy.weights(model)) - len(ours)),
        "more collectives": float(len(both.collectives) - len(plain.collectives)),
        "of the teacher": float(len(of_teacher.collectives)),
    }


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense checkpoint."""
    folder = tmp_path_factory.mktemp("teacher")
    (folder / "tokenizer.json").write_text("{}")
    config = toy.toy_config("float64", model={"family": "dense", "layers": 3, "init_std": 0.3})
    return save(folder / "c", config, folder / "tokenizer.json")


@pytest.mark.slow
@pytest.mark.parametrize(("model", "parallel", "train"), CELLS, ids=[f"{p}".strip("{}") for _, p, _ in CELLS])
def test_every_layout_is_one_process(
    teacher: Path, model: dict[str, Any], parallel: dict[str, Any], train: dict[str, Any]
) -> None:
    train = {"global_batch": SEQUENCES, "micro_batch": 2, **train}
    distill = {"teacher": str(teacher), **DISTILL}
    config = toy.toy_config("float64", model=model, parallel=parallel, train=train, distill=distill)
    for errors in run_distributed(2, against_one_process, config):
        assert max(errors["loss"], errors["cross-entropy"]) <= 1e-10, errors
        assert errors["gradients"] <= 1e-10, errors
        assert errors["missing"] == errors["more collectives"] == 0
        assert (errors["of the teacher"] > 0) == (config.parallel.tp * config.parallel.cp > 1)
