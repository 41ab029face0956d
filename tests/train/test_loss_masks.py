"""Training on conversations: under every layout, mesh and micro-batch, the loss is the mean over the counted tokens of the global
batch, and its gradient that of the model on one process."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from boost.config import Config, load
from boost.config.architecture import IGNORED
from boost.config.optimizers import OptimConfig
from boost.data.mixture import Corpus
from boost.train.checkpoint import HUB
from boost.train.evaluate import Evaluation, evaluate
from boost.train.resume import inherited_data
from tests import toy
from tests.data.chats import CHATML, chat_store_in
from tests.distributed import run_distributed
from tests.matrices import LAYOUTS, family_of, first
from tests.train.runs import RATE, make_config, mask_step, started

STEPS = 3


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of conversations."""
    return chat_store_in(tmp_path_factory.mktemp("chats"), count=40).path


def config_on(store: Any, run: Path, tp: int = 1, isolate: bool = False, **sections: Any) -> Config:
    model = {"vocab_size": 304, **sections.pop("model", {})}
    train = {"global_batch": 8, "micro_batch": 2, **sections.pop("train", {})}
    config = make_config(store, run, tp, model=model, train=train, **sections)
    return config.model_copy(update={"data": config.data.model_copy(update={"isolate_documents": isolate})})


def numbers(config: Config) -> list[tuple[float, float]]:
    """(loss, gradient norm) of a few steps: the later ones depend on every gradient before."""
    trainer = started(config)
    steps = [trainer.step(RATE) for _ in range(STEPS)]
    return [(step.loss, step.gradient_norm) for step in steps]


def test_the_loss_is_that_of_the_answers_alone(chats: Path, tmp_path: Path) -> None:
    """Against torch's own cross-entropy, with the tokens of the answers looked up in the store."""
    trainer = started(config_on(chats, tmp_path))
    (batch,) = trainer.batches.numbered(0, [0], 8)
    counted = batch.targets != IGNORED
    assert 0.05 < counted.mean() < 0.6
    per_row = counted.sum(1)
    assert len(set(per_row.tolist())) > 2, "a mean of means would be another number"
    model = trainer.model
    with torch.no_grad():
        losses = np.zeros(batch.targets.shape)
        for row, column in zip(*np.nonzero(counted), strict=True):
            targets = np.full_like(batch.targets[row : row + 1], IGNORED)
            targets[0, column] = batch.targets[row, column]
            losses[row, column] = model(torch.from_numpy(batch.tokens[row : row + 1]), torch.from_numpy(targets)).item()
    assert trainer.step(RATE).loss == pytest.approx(losses[counted].mean(), rel=1e-12)


HEADS = [{"layout": "btp", "norm": "online"}, {"layout": "btp-sp"}, {"layout": "btp-cp"}, {"layout": "megatron-sp"}]
MESHES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *(({"family": family_of(layout), "kv_heads": 4}, {**layout, "tp": 2}) for layout in HEADS),
    ({}, {"tp": 1, "dp": 2, "shard": "full"}),
    ({}, {"tp": 1, "cp": 2}),
    ({}, {"tp": 1, "pp": 2}),
]
NIGHTLY: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *(({"family": family_of(layout), "kv_heads": 4}, {**layout, "tp": 2}) for layout in LAYOUTS if layout not in HEADS),
    ({}, {"layout": "ulysses", "tp": 2}),
    ({}, {"layout": "btp-sp", "tp": 2, "overlap": "halves"}),
    ({}, {"tp": 1, "dp": 2}),
]


@pytest.mark.slow  # every kind of head and residual stream, and every way to share a batch
@pytest.mark.parametrize(("model", "parallel"), first(len(MESHES), [*MESHES, *NIGHTLY]))
def test_every_layout_and_mesh_is_one_process(
    chats: Path, tmp_path: Path, model: dict[str, Any], parallel: dict[str, Any]
) -> None:
    model = {"layers": 1 + (parallel.get("pp", 1) - 1), "dim": 32, **model}
    rest = {key: value for key, value in parallel.items() if key != "tp"}
    config = config_on(chats, tmp_path, parallel["tp"], isolate=True, model=model, parallel=rest)
    expected = numbers(config_on(chats, tmp_path, isolate=True, model=model))
    for found in run_distributed(2, numbers, config):
        assert np.array(found) == pytest.approx(np.array(expected), rel=1e-10)


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"decay_on": "all"},
    "loro": {"name": "loro", "exact_every": 2},
    "muon": {"name": "muon"},
}
MASKED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    *((name, {}, {"tp": 1}) for name in OPTIMIZERS),
    ("adamw", {}, {"layout": "btp", "tp": 2}),
    ("muon", {}, {"layout": "btp-sp", "tp": 2}),
    ("adamw", {"layers": 2}, {"tp": 1, "pp": 2}),
    ("adamw", {}, {"tp": 1, "dp": 2, "shard": "full"}),
    ("loro", {"family": "svd"}, {"layout": "vanilla", "tp": 2}),
    ("adamw", {"family": "dense", "kv_heads": 4}, {"layout": "megatron", "tp": 2}),
    ("muon", {}, {"tp": 1, "dp": 2, "shard": "optimizer"}),
    ("adamw", {}, {"tp": 1, "cp": 2}),
]


def a_masked_step(config: Config, ahead: bool) -> None:
    trainer = started(config, ahead=ahead)
    warnings: list[str] = []
    trainer.warn = warnings.append  # type: ignore[method-assign]
    mask_step(trainer, 3)
    mask_step(trainer, 4)

    def state() -> list[torch.Tensor]:
        weights = [fused.tensor.detach() for fused in trainer.fused_params]
        return [x.clone() for x in (*weights, *trainer.optimizer.state_tensors())]

    states = []
    for number in range(1, 6):
        found = trainer.step(RATE)
        assert (found.targets, found.loss, found.gradient_norm) == (0, 0, 0) if number in (3, 4) else found.loss > 0
        states.append(state())
    for before, after in zip(states[1], states[3], strict=True):
        assert torch.equal(before, after), "neither weights nor moments change"
    assert not all(map(torch.equal, states[3], states[4])) and trainer.optimizer.updates in (3, 1)
    assert trainer.judge.bad_steps == 0 and trainer.position.step == 5
    assert warnings == ["step 3 changed nothing, because the loss masks exclude all of its tokens"]


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "model", "parallel"), first(7, MASKED))
def test_a_step_without_targets_changes_nothing(
    store: Path, tmp_path: Path, optimizer: str, model: dict[str, Any], parallel: dict[str, Any]
) -> None:
    """Decoupled weight decay, momentum, and LORO's exact steps would move the weights although all gradients are 0."""
    model = {"family": "cola" if optimizer != "loro" else "svd", **model}
    rest = {key: value for key, value in parallel.items() if key != "tp"}
    config = make_config(store, tmp_path, parallel["tp"], model=model, parallel=rest)
    optim = OptimConfig.model_validate({"lr": RATE, "weight_decay": 0.1, **OPTIMIZERS[optimizer]})
    config = config.model_copy(update={"optim": optim})
    for ahead in (False, True) if config.parallel.world_size == 1 and optimizer == "adamw" else (False,):
        run_distributed(config.parallel.world_size, a_masked_step, config, ahead)


def evaluation(store: Path, config: Config, batch: int) -> Evaluation:
    model, mesh = toy.toy_model(config)
    return evaluate(model, Corpus.open({str(store): 1.0}).split("heldout"), 32, batch, False, mesh)


def test_evaluation_is_over_the_answers(chats: Path, tmp_path: Path) -> None:
    split = Corpus.open({str(chats): 1.0}).stores[0].split("heldout")
    config = config_on(chats, tmp_path)
    result = evaluation(chats, config, 3)
    assert result.tokens == split.n_targets
    assert result.bits_per_byte == pytest.approx(
        result.loss / np.log(2) * split.n_targets / split.n_target_bytes  # type: ignore[operator]
    )
    assert evaluation(chats, config, 8).loss == pytest.approx(result.loss, rel=1e-12)


def test_checkpoints_of_a_run_on_conversations_have_their_chat_template(
    chats: Path, store: Path, tmp_path: Path
) -> None:
    data = inherited_data(load(None), Corpus.open({str(chats): 1.0}), None)
    assert data[HUB]["chat_templates"] == {"default": CHATML}
    assert data[HUB]["tokenizer"]["eos_token"] == "<|im_end|>"
    assert inherited_data(load(None), Corpus.open({str(store): 1.0}), None) == {}
