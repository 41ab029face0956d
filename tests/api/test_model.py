"""`boost.Model` and `boost.Trainer`: training from Python, and the results."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import boost
from boost.cli.main import main
from boost.errors import BoostError, ConfigError
from boost.train.events import StepEnd
from tests import toy
from tests.distributed import run_distributed
from tests.nn import ways
from tests.train.runs import losses

SIZES = {"vocab_size": 300, "dim": 32, "ffn_dim": 48, "layers": 2, "heads": 4, "rank": 8}


def tree(store: Path, folder: Path, **model: Any) -> dict[str, Any]:
    return {
        "model": {"family": "cola", **SIZES, **model},
        "train": {"steps": 4, "seq_len": 32, "global_batch": 4, "micro_batch": 4},
        "optim": {"lr": 3e-3},
        "data": {"store": str(store)},
        "run": {"dir": str(folder), "device": "cpu", "peak_tflops": 1},
    }


class Watch(boost.Hook):
    """Records the losses."""

    def __init__(self, stop_at: int = 0) -> None:
        self.losses: list[float] = []
        self.stop_at = stop_at

    def after_step(self, trainer: Any, event: StepEnd) -> None:
        self.losses.append(event.metrics.loss)
        if event.metrics.step == self.stop_at:
            trainer.request_stop("a test")


@pytest.fixture
def trained(store: Path, tmp_path: Path) -> boost.Trainer:
    trainer = boost.Trainer(tree(store, tmp_path / "run"))
    trainer.fit()
    return trainer


def test_a_run_with_hooks(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    watch = Watch()
    result = boost.Trainer(tree(store, tmp_path / "run"), hooks=[watch]).fit()
    assert result.position.step == len(watch.losses) == 4 and result.evaluation is not None
    assert main(["train", str(tmp_path / "run" / "config.toml"), "--run.dir", str(tmp_path / "other")]) == 0
    capsys.readouterr()
    both = [boost.Model.from_pretrained(tmp_path / name) for name in ("run", "other")]
    one, other = (dict(model.decoder.whole_parameters()) for model in both)
    assert all(torch.equal(one[name], other[name]) for name in one), "the same run as the command's"


@contextlib.contextmanager
def unusual() -> Iterator[None]:
    """What a script may have set for its own computations."""
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def test_what_a_script_has_set_changes_nothing(store: Path, tmp_path: Path, trained: boost.Trainer) -> None:
    made: list[Any] = []

    def fit() -> None:
        with unusual():
            before = torch.manual_seed(5).get_state()
            trainer = boost.Trainer(tree(store, tmp_path / "other"))
            with pytest.warns(UserWarning, match="not on the main thread"):
                made.append(trainer.fit())
            assert torch.equal(torch.get_rng_state(), before) and torch.get_default_dtype() == torch.float64
            made.append(torch.is_inference_mode_enabled() and torch.is_autocast_enabled("cpu"))

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        thread = threading.Thread(target=fit)
        thread.start()
        thread.join()
        assert made[1] and dist.is_initialized()
    finally:
        dist.destroy_process_group()
    assert losses(tmp_path / "other") == losses(tmp_path / "run")


def test_a_hook_stops_it_and_it_resumes(store: Path, tmp_path: Path) -> None:
    config = tree(store, tmp_path / "run")
    result = boost.Trainer(config, hooks=[Watch(stop_at=2)]).fit()
    assert result.stopped and not result.by_signal and result.position.step < 4
    with pytest.raises(BoostError, match="--resume|not empty"):
        boost.Trainer(config)
    watch = Watch()
    assert boost.Trainer(config, hooks=[watch], resume="auto").fit().position.step == 4
    assert len(watch.losses) == 4 - result.position.step


class Signal(boost.Hook):
    """Sends SIGTERM to this process at step 2."""

    def after_step(self, trainer: Any, event: StepEnd) -> None:
        if event.metrics.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_ends_a_script_before_its_next_model(store: Path, tmp_path: Path) -> None:
    """`except Exception` does not swallow it, and the exit code asks for another start, which resumes from the checkpoint."""
    trained = []

    def script() -> None:
        for name in ("one", "two"):
            trained.append(name)
            with contextlib.suppress(Exception):
                boost.Trainer(tree(store, tmp_path / name), hooks=[Signal()]).fit()

    with pytest.raises(boost.Stopped) as stop:
        script()
    assert trained == ["one"] and stop.value.code == 75
    result = stop.value.result
    assert result.stopped and result.checkpoint.is_dir()
    step = result.position.step
    assert str(stop.value) == (
        f"SIGTERM stopped the run at step {step} of 4; checkpoint: {result.checkpoint}; "
        "resume with boost.Trainer(..., resume='auto')"
    )
    resumed = boost.Trainer(tree(store, tmp_path / "one"), resume="auto").fit()
    assert (resumed.position.step, resumed.stopped) == (4, False)


def test_a_script_may_ask_for_the_result_of_a_stopped_run(store: Path, tmp_path: Path) -> None:
    result = boost.Trainer(tree(store, tmp_path / "run"), hooks=[Signal()]).fit(return_if_stopped=True)
    assert result.stopped and result.stopped_by == "SIGTERM" and result.position.step < 4


def test_weights_that_a_run_starts_from_choose_the_rate(trained: boost.Trainer, tmp_path: Path) -> None:
    config = tree(Path(str(trained.config.data.store)), tmp_path / "healed")
    del config["optim"], config["train"]["seq_len"]
    healing = boost.Trainer(config, start_from=trained.config.run.dir).config
    assert (healing.optim.lr, healing.train.seq_len) == (1e-4, trained.config.train.seq_len)


def test_its_model_generates_as_the_command_does(trained: boost.Trainer, capsys: pytest.CaptureFixture[str]) -> None:
    model = trained.model()
    words = ["--prompt", "import ", "--max-tokens", "12", "--seed", "5", "--device", "cpu"]
    assert main(["generate", trained.config.run.dir, *words]) == 0
    assert capsys.readouterr().out.rstrip("\n").endswith(model.generate("import ", 12, seed=5).rstrip("\n"))
    seen: list[int] = []
    ids = model.generate([3, 4, 5], 6, temperature=0, on_token=seen.append)
    assert ids == seen and all(0 <= token < 300 for token in ids)
    assert model.tokenizer.decode(model.tokenizer.encode("def f").ids) == "def f"


def test_save_and_load_round_trips(trained: boost.Trainer, tmp_path: Path) -> None:
    model = trained.model()
    again = boost.Model.from_pretrained(model.save(tmp_path / "saved"))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))
    assert again.generate("x = ", 5) == model.generate("x = ", 5)
    with pytest.raises(ConfigError, match=r"path = .*exists"):
        model.save(tmp_path / "saved")


def test_frozen_and_tied_parameters_are_saved(tmp_path: Path) -> None:
    model = boost.Model.from_config({"model": {"family": "cola", **SIZES}}).double()
    ways.tie(ways.share(".attn.q_proj", ways.freeze(model.decoder)))
    again = boost.Model.from_pretrained(model.save(tmp_path / "saved"))
    assert [p.requires_grad for p in again.parameters()] == [p.requires_grad for p in model.parameters()]
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))
    decoder = again.decoder
    assert decoder.lm_head.weight is decoder.embedding.weight and decoder.embedding.weight.dtype == torch.float64
    assert decoder.layers[1].attn.q_proj.A.weight is decoder.layers[0].attn.q_proj.A.weight
    untied = boost.Model.from_pretrained(tmp_path / "saved", untie=True).decoder
    assert untied.lm_head.weight is not untied.embedding.weight
    assert torch.equal(untied.lm_head.weight, decoder.lm_head.weight)


def test_a_run_says_what_it_does_not_keep(
    trained: boost.Trainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = trained.model()
    ways.freeze(model.decoder)
    model.save(tmp_path / "saved")
    config = tree(Path(str(trained.config.data.store)), tmp_path / "next")
    with caplog.at_level("WARNING", "boost"):
        boost.Trainer(config, start_from=tmp_path / "saved").fit()
    assert "frozen or tied in the checkpoint are trained" in caplog.text
    assert all(p.requires_grad for p in boost.Model.from_pretrained(tmp_path / "next").parameters())


@pytest.mark.slow
def test_peft_adapts_a_model(tmp_path: Path) -> None:
    """LoRA on every factor, trained, is refused when saved, and saved once it is merged."""
    peft = pytest.importorskip("peft")
    model = boost.Model.from_config({"model": {"family": "cola", **SIZES}}, dtype=torch.float64)
    tokens = torch.arange(16).view(2, 8)
    before = model(tokens)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["A", "B"], init_lora_weights=False))
    after = adapted(tokens)
    assert (after - before).abs().max() > 1e-3 * before.abs().max()
    adapted(tokens, tokens).backward()
    assert all((p.grad is not None) == ("lora_" in name) for name, p in adapted.named_parameters())
    assert adapted.generate([1, 2, 3], 2, temperature=0)
    with pytest.raises(ConfigError, match=r"q_proj\.A is a peft.*Linear, but a checkpoint"):
        model.save(tmp_path / "saved")
    assert not list(tmp_path.iterdir())
    merged = adapted.merge_and_unload()
    assert merged is model
    again = boost.Model.from_pretrained(model.save(tmp_path / "saved"))
    torch.testing.assert_close(again(tokens), after, rtol=1e-10, atol=1e-12)
    frozen = [not p.requires_grad for p in again.parameters()]
    assert all(frozen), "as peft left them"


@pytest.mark.slow
def test_exports_load_in_transformers_and_here(tmp_path: Path, transformers: Any) -> None:
    model = boost.Model.from_config(toy.toy_config("float32", model={**SIZES, "family": "lax"}))
    folder = model.export(tmp_path / "out", merge=False)
    tokens = torch.arange(1, 13).view(1, 12)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
    torch.testing.assert_close(theirs(tokens).logits, model(tokens), rtol=1e-4, atol=1e-5)
    again = boost.Model.from_pretrained(folder)
    assert again.decoder.model.family == "lax"
    torch.testing.assert_close(again(tokens), model(tokens), rtol=1e-5, atol=1e-6)
    assert not list(tmp_path.glob(".*")), "nothing is left behind"


def test_new_models() -> None:
    model = boost.Model.from_preset("demo", {"model.layers": 1, "model.dim": 64, "model.heads": 4, "model.rank": 16})
    assert model.decoder.model.layers == 1 and model.decoder.model.rank == 16
    tokens = torch.arange(8).view(1, 8)
    assert model(tokens).shape == (1, 8, model.decoder.model.vocab_size)
    model(tokens, tokens).backward()
    with pytest.raises(ConfigError, match="this model has no tokenizer; pass token ids"):
        model.generate("text")
    with pytest.raises(ConfigError, match="named 'dmeo'; did you mean 'demo'"):
        boost.Model.from_preset("dmeo")
    with pytest.raises(ConfigError, match="is not a folder"):
        boost.Model.from_pretrained("nowhere")


def load_sharded(folder: str, out: str) -> tuple[float, list[int]]:
    tokens = torch.arange(1, 17).view(1, 16)
    single, model = (boost.Model.from_pretrained(folder, mesh=mesh, layout="btp") for mesh in (None, dist.group.WORLD))
    error = float((model(tokens) - single(tokens)).abs().max())
    new = model.generate([1, 2, 3], 4, temperature=0)
    model.save(out)
    model.export(f"{out}-hf")
    again = dict(boost.Model.from_pretrained(out).decoder.whole_parameters())
    whole = dict(single.decoder.whole_parameters())
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    return error, new


def test_a_checkpoint_loads_under_a_layout(trained: boost.Trainer, tmp_path: Path) -> None:
    results = run_distributed(2, load_sharded, trained.config.run.dir, str(tmp_path / "sharded"))
    assert results[0] == results[1] and results[0][0] <= 1e-5
    assert trained.model().generate([1, 2, 3], 4, temperature=0) == results[0][1]
    assert (tmp_path / "sharded-hf" / "config.json").is_file()


def test_a_mesh_needs_its_processes(store: Path, tmp_path: Path) -> None:
    config = {**tree(store, tmp_path / "run"), "parallel": {"tp": 2}}
    with pytest.raises(ConfigError, match=r"the mesh size \(2\) differs .* processes \(1\)"):
        boost.Trainer(config)
