"""`boost import`, and what follows: evaluation, generation, and a run that starts from the weights and resumes."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import boost
from boost.errors import ConfigError
from boost.train.checkpoint import WeightReader, open_checkpoint
from boost.train.metrics import read_metrics
from tests.cli.commands import Capture, done, llama_of, say
from tests.convert.toys import write_folder

STEPS = ["--train.seq_len", "32", "--train.global_batch", "2", "--train.micro_batch", "2", "--run.device", "cpu"]


@pytest.fixture
def llama(tmp_path: Path, store: Path) -> Path:
    return llama_of(store, tmp_path / "llama")


def test_calibrated_factors(llama: Path, store: Path, tmp_path: Path, capsys: Capture) -> None:
    words = ["import", str(llama), "--device", "cpu", "--budget", "0.6", "--multiple", "2"]
    words += ["--calibrate", str(store), "--calibrate-tokens", "1024"]
    said = done(capsys, *words, "--out", str(tmp_path / "table"))
    for text in ("mlp.down", "48 x 32", "cost", "linears: ", "held-out loss: "):
        assert text in said
    # Per block 7,680 parameters in linears (2 of 32 x 32, 2 of 16 x 32, 3 of 48 x 32) and 64 in norms.
    whole = 2 * (7_680 + 64) + 32 + 2 * 300 * 32
    of = json.loads((tmp_path / "table" / "report.json").read_text())["parameters"]
    assert of["linears"] == 2 * 7_680 and of["factors"] <= 0.6 * of["linears"]
    assert (of["before"], of["before"] - of["after"], of["untied"]) == (whole, of["linears"] - of["factors"], 0)
    share = f"{of['factors'] / 15_360:.1%}"
    assert f"parameters instead of 15,360 ({share}; --budget allows 60.0%" in said
    assert f"whole model: {of['after']:,} parameters instead of {whole:,} ({of['after'] / whole:.1%})\n" in said
    said = done(capsys, "eval", str(tmp_path / "table"), "--store", str(store), "--max-tokens", "512", "--json")
    assert 0 < json.loads(said)["loss"] < 20


def test_a_tied_model_is_untied_on_request_and_the_report_counts_its_head(
    llama: Path, store: Path, tmp_path: Path, capsys: Capture
) -> None:
    config = json.loads((llama / "config.json").read_text()) | {"tie_word_embeddings": True}
    tensors = load_file(llama / "model.safetensors")
    del tensors["lm_head.weight"]
    write_folder(llama, config, tensors)
    calibrated = ["--budget", "0.6", "--multiple", "2", "--calibrate", str(store), "--calibrate-tokens", "256"]
    for number, words in enumerate(([], ["--energy", "0.9"], calibrated)):
        out = tmp_path / str(number)
        command = ["import", str(llama), "--out", str(out), "--device", "cpu", *words]
        done(capsys, *command)
        shutil.rmtree(out)
        said = done(capsys, *command, "--untie", *["--json"] * (not words))
        if not words:
            facts = json.loads(said)
            assert facts["parameters"] - facts["untied_parameters"] == 2 * (7_680 + 64) + 32 + 9_600
            continue
        of = json.loads((out / "report.json").read_text())["parameters"]
        assert (of["before"], of["untied"]) == (2 * (7_680 + 64) + 32 + 9_600, 9_600)
        whole = f"{of['after']:,} parameters instead of {of['before']:,} ({of['after'] / of['before']:.1%})"
        assert f"whole model: {whole}; untying the head" in said and "embedding added 9,600" in said
        assert "energy kept" in said and "relative error" in said
        assert "9600" in next(line for line in said.splitlines() if line.startswith("untied parameters"))


def test_generation_samples_and_ends_as_the_folder_says(llama: Path, tmp_path: Path, capsys: Capture) -> None:
    settings = {"do_sample": True, "temperature": 9.0, "top_k": 1}
    (llama / "generation_config.json").write_text(json.dumps(settings))
    done(capsys, "import", str(llama), "--out", str(tmp_path / "c"))
    words = ["generate", str(tmp_path / "c"), "--prompt", "def ", "--json", "--max-tokens", "8"]
    greedy = done(capsys, *words, "--greedy")
    assert done(capsys, *words) == greedy != done(capsys, *words, "--top-k", "0")
    model = boost.Model.from_pretrained(llama)
    assert model.generate("def ", 8) == json.loads(greedy)["text"] != model.generate("def ", 8, top_k=0)
    tokens, new = json.loads(greedy)["tokens"], list[int]()
    (llama / "generation_config.json").write_text(json.dumps({**settings, "eos_token_id": [0, tokens[2]]}))
    done(capsys, "import", str(llama), "--out", str(tmp_path / "ends"))
    boost.Model.from_pretrained(llama).generate("def ", 8, on_token=new.append)
    ended = json.loads(done(capsys, "generate", str(tmp_path / "ends"), *words[2:]))
    assert ended["tokens"] == new == tokens[: tokens.index(tokens[2]) + 1] != tokens
    for name, value in (("temperature", 10**30), ("top_k", True)):
        (llama / "generation_config.json").write_text(json.dumps({"do_sample": True, name: value}))
        with pytest.raises(ConfigError, match=f"{name} = {value} in the imported generation_config.json is not valid"):
            boost.Model.from_pretrained(llama).generate("def ", 8)


@pytest.mark.slow
def test_a_run_starts_from_weights_and_is_resumed(llama: Path, store: Path, tmp_path: Path, capsys: Capture) -> None:
    start, run = str(tmp_path / "c"), tmp_path / "run"
    said = done(capsys, "import", str(llama), "--out", start, "--rank", "32", "--device", "cpu", "--json")
    assert {row["rank"] for row in json.loads(said)["report"]["linears"]} == {16, 32}
    words = ["train", "--start-from", start, "--data.store", str(store), "--run.dir", str(run), *STEPS]
    code, said, err = say(capsys, *words, "--train.steps", "1", "--optim.lr", "1e-30")
    assert code == 0, err
    assert f"initialized from the weights of {start}" in said + err
    assert "--model.ranks" not in said + err, "no advice to change a model that is given"
    saved = open_checkpoint(run)
    assert saved.context == open_checkpoint(Path(start)).context > saved.config.train.seq_len
    assert saved.config.model.ranks == {"attn.k": 16, "attn.v": 16}
    assert (saved.position.step, saved.updates) == (1, 1)
    before, after = WeightReader(open_checkpoint(Path(start))), WeightReader(saved)
    for name in ("embed", "layers.1.attn.k.A", "head"):
        torch.testing.assert_close(after.read(name), before.read(name), rtol=1e-6, atol=0)
    code, said, err = say(capsys, *words, "--train.steps", "2", "--resume", "auto")
    assert code == 0, err
    assert "resumed at step 1 of 2" in said + err
    assert "starts from" not in said + err
    losses = [line["loss"] for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "step"]
    assert len(losses) == 2 and all(map(math.isfinite, losses))


def test_mistakes_are_one_line(llama: Path, store: Path, tmp_path: Path, capsys: Capture) -> None:
    bare, whole, out = str(tmp_path / "bare"), str(tmp_path / "whole"), str(tmp_path / "out")
    (llama / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    assert say(capsys, "import", str(llama), "--out", bare)[0] == 0
    named = ["--tokenizer", str(tmp_path / "tokenizer.json")]
    assert say(capsys, "import", str(llama), "--out", whole, *named)[0] == 0
    alone = ["demo", "--parallel.tp", "1"]
    begin = ["train", "--data.store", str(store), "--run.dir", out, *STEPS]
    for words, expected in (
        (["import", str(llama), "--out", bare], "is not an empty folder"),
        (["import", str(llama), "--out", out, "--budget", "0.5"], "--budget FRACTION and --calibrate STORE require"),
        (["import", str(llama), "--out", out, "--calibrate", "x"], "--budget FRACTION and --calibrate STORE require"),
        (["import", str(llama), "--out", out, "--calibrate-tokens", "9"], "--calibrate-tokens requires --calibrate"),
        (["import", str(llama), "--out", out, "--tokenizer", "/nowhere"], "--tokenizer = '/nowhere' does not exist"),
        (["eval", bare, "--store", str(store)], "has no tokenizer"),
        (["generate", bare], "has no tokenizer"),
        ([*begin, "--start-from", bare], "has no tokenizer"),
        (["train"], "CONFIG is missing"),
        ([*begin, *alone, "--resume", whole, "--run.dir", f"{out}2"], "start a run from it with --start-from"),
        ([*begin, "--start-from", "/nowhere"], "no checkpoint at '/nowhere'"),
        ([*begin, "--start-from", whole, "--resume", whole], "conflict; use one of them"),
        ([*begin, "--start-from", whole, "--model.layers", "3"], "model.layers is 2 instead of 3"),
        ([*begin, *alone, "--start-from", whole], "has a different model: model.family is 'dense' instead of"),
    ):
        code, said, err = say(capsys, *words)
        assert (code, said, err.count("\n")) == (2, "", 1), (words, err)
        assert expected in err
        assert not Path(out).exists()
