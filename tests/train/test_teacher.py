"""Which layout a teacher gets, what is refused before a process starts, and a run that distills and is resumed."""

import math
from pathlib import Path
from typing import Any

import pytest

from boost.config import Config
from boost.data.store import TokenStore
from boost.errors import BoostError, ConfigError
from boost.train.checkpoint import WeightReader, complete_checkpoints, open_checkpoint, step_of
from boost.train.metrics import read_metrics
from boost.train.teacher import check_teacher, teacher_config
from tests import toy
from tests.cli.commands import say
from tests.convert.toys import save
from tests.distributed import run_distributed
from tests.train.runs import Scale, Warnings, fitted, make_config


def student(**sections: Any) -> Config:
    return toy.toy_config("float32", **{"distill": {"teacher": "t"}, **sections})


DENSE = toy.toy_config("float32", model={"family": "dense"}).model


@pytest.mark.parametrize(
    ("parallel", "layout"),
    [
        ({"layout": "btp", "tp": 2}, "megatron-sp"),
        ({"layout": "btp-sp", "tp": 2}, "megatron-sp"),
        ({"layout": "vanilla", "tp": 2}, "megatron"),
        ({"layout": "ulysses", "tp": 2}, "ulysses"),
    ],
)
def test_the_layout_of_a_dense_teacher(parallel: dict[str, Any], layout: str) -> None:
    found = teacher_config(student(parallel=parallel, train={"recompute": "low-rank"}), DENSE)
    assert found.parallel.layout == layout
    assert (found.parallel.tp, found.train.recompute, found.distill.teacher) == (2, "none", "")


def test_the_teacher_computes_in_the_dtype_of_the_activations() -> None:
    config = student(train={"param_dtype": "float32", "compute_dtype": "bfloat16"})
    assert teacher_config(config, DENSE).train.param_dtype == "bfloat16"


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"parallel": {"pp": 2}}, "does not support pipelines, but parallel.pp = 2; nearest valid value: 1"),
        (
            {"parallel": {"dp": 2}, "run": {"recovery": "in-step"}},
            "does not support run.recovery = 'in-step'.*set run.recovery = 'restart'",
        ),
        ({"distill": {"teacher": "t", "weight": 0.0}}, "leave nothing to learn"),
        ({"distill": {"weight": 0.7}}, "distill.weight = 0.7 has no effect without distill.teacher"),
        ({"distill": {"teacher": "t", "temperature": 0.0}}, "distill.temperature = 0.0 is too small"),
    ],
)
def test_what_cannot_be_configured(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        student(**sections)


def test_teachers_that_do_not_fit() -> None:
    other = DENSE.model_copy(update={"vocab_size": 128})
    with pytest.raises(ConfigError, match=r"model.vocab_size = 128, but the model has 64"):
        teacher_config(student(), other)
    wide = DENSE.model_copy(update={"dim": 64})
    assert teacher_config(student(), wide).model.dim == 64
    with pytest.raises(ConfigError, match=r"model.dim = 64 and the model has 32; set distill.hidden = 0"):
        teacher_config(student(distill={"teacher": "t", "hidden": 1.0}), wide)
    odd = DENSE.model_copy(update={"heads": 1, "kv_heads": 1})
    with pytest.raises(ConfigError, match=r"does not fit this mesh: .*model.heads = 1"):
        teacher_config(student(parallel={"layout": "btp", "tp": 2}), odd)


@pytest.fixture
def dense(tmp_path: Path, store: Path) -> Path:
    config = toy.toy_config("float32", model={"family": "dense", "vocab_size": 300, "heads": 4, "kv_heads": 4})
    fingerprint = TokenStore.open(store).fingerprint
    return save(tmp_path / "dense", config, store / "tokenizer.json", fingerprint=fingerprint)


def test_a_teacher_needs_the_same_tokenizer(tmp_path: Path, dense: Path, store: Path) -> None:
    config = student(model={"vocab_size": 300}, distill={"teacher": str(dense)})
    assert check_teacher(config, TokenStore.open(store)) is not None
    other = save(tmp_path / "other", open_checkpoint(dense).config, store / "tokenizer.json", fingerprint="another")
    config = student(model={"vocab_size": 300}, distill={"teacher": str(other)})
    with pytest.raises(BoostError, match=r"differs from that of distill.teacher = "):
        check_teacher(config, TokenStore.open(store))
    (tmp_path / "a hub").mkdir()
    (tmp_path / "a hub" / "config.json").write_text("{}")
    config = student(model={"vocab_size": 300}, distill={"teacher": str(tmp_path / "a hub")})
    with pytest.raises(ConfigError, match=r"is a Hugging Face folder; convert it first: boost import '.*/a hub' --out"):
        check_teacher(config, TokenStore.open(store))


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_the_other_terms_of_a_distillation_are_no_divergence(tmp_path: Path, dense: Path, store: Path, tp: int) -> None:
    """With a weight of 100 for hidden states the loss is far above 1.5 ln(vocabulary) from the first step on. Ruined weights are
    still found, by the cross-entropy."""
    run_distributed(tp, distill_and_ruin, tmp_path, dense, store, tp)


def distill_and_ruin(tmp_path: Path, dense: Path, store: Path, tp: int) -> None:
    distill = {"teacher": str(dense), "hidden": 100.0, "weight": 1.0}
    train = {"steps": 5, "save_every": 1, "keep": 9, "async_save": False}
    hook, warnings = Scale(4, 300.0), Warnings()
    model = {"family": "svd", "heads": 4, "kv_heads": 4}
    config = make_config(store, tmp_path / "run", tp, "float32", model=model, train=train, distill=distill)
    trainer = fitted(config, hook, warnings)
    assert min(hook.losses) > 1.5 * math.log(300), hook.losses
    steps = [step_of(path) for path in complete_checkpoints(trainer.run.checkpoints)]
    assert steps == [1, 2, 3, 5], "before the ruin, and at the end"
    found = [text for text in warnings.seen if text.startswith("diverged at step ")]
    assert len(found) == 1 and found[0].startswith("diverged at step 4: cross-entropy "), warnings.seen


@pytest.mark.slow
def test_a_run_distills_and_is_resumed(
    tmp_path: Path, dense: Path, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the teacher's own weights and weight 1, the loss is 0 and stays there; the resumed run needs the teacher too."""
    run = tmp_path / "run"
    words = ["train", "--start-from", str(dense), "--distill-from", str(dense), "--data.store", str(store)]
    words += ["--run.dir", str(run), "--run.device", "cpu", "--distill.weight", "1.0", "--optim.weight_decay", "0.0"]
    words += ["--train.seq_len", "32", "--train.global_batch", "4", "--train.micro_batch", "2", "--optim.lr", "1e-6"]
    assert say(capsys, *words, "--train.steps", "1")[0] == 0
    code, out, err = say(capsys, *words, "--train.steps", "2", "--resume", "auto")
    assert code == 0, err
    steps = [line for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "step"]
    assert [line["step"] for line in steps] == [1, 2]
    assert max(abs(line["loss"]) for line in steps) < 1e-5
    assert (
        all(line["cross_entropy"] > 1 for line in steps) and out.count("distillation loss 0.0000  cross-entropy") == 1
    )
    saved = open_checkpoint(run)
    assert (saved.config.distill.teacher, saved.config.distill.weight) == (str(dense), 1.0)
    assert WeightReader(saved).names() == WeightReader(open_checkpoint(dense)).names()
    code, _, err = say(
        capsys, *words, "--train.steps", "2", "--distill.hidden", "-1", "--run.dir", str(tmp_path / "other")
    )
    assert (code, err.count("\n")) == (2, 1)
