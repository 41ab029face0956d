"""`boost plan` for users and programs."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from boost.cli.main import main
from boost.cli.plan import global_batch
from boost.cli.plan_report import flags
from boost.config import load
from boost.config.load import from_tree
from boost.plan.search import max_peak

SMALL = ["--model", "cola-60m", "--gpus", "4", "--gpu", "a100-80g", "--global-batch", "64"]


def say(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["plan", *words])
    out, err = capsys.readouterr()
    return code, out, err


def facts(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    code, out, err = say(capsys, *words, "--json")
    assert code == 0, err
    result: dict[str, Any] = json.loads(out)
    return result


def test_json_is_a_plan_that_fits_and_loads(capsys: pytest.CaptureFixture[str]) -> None:
    found = facts(capsys, *SMALL, "--price", "2")
    best = found["best"]
    config = from_tree(
        {name: {k: v for k, v in table.items() if v is not None} for name, table in best["config"].items()}
    )
    assert (
        config.parallel.world_size == 4 and config.train.global_batch == 64 and config.train.compute_dtype == "bfloat16"
    )
    assert max_peak(config, on_gpu=True)[0].total == best["memory_bytes"] <= best["usable_bytes"]
    assert sum(best["step_parts"].values()) == pytest.approx(best["step_seconds"])
    tokens = best["tokens_per_second"]
    assert found["tokens"] == 64 * 256 == pytest.approx(tokens * best["step_seconds"])
    assert best["cost_per_billion_tokens"] == pytest.approx(2 * 4 * 1e9 / tokens / 3600)
    assert found["runners_up"] and all(each["step_seconds"] >= best["step_seconds"] for each in found["runners_up"])


def test_the_report_says_how_to_run_it_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = say(capsys, *SMALL, "--price", "2", "--explain")
    assert code == 0
    for words in ("fastest configuration that fits", "boost train cola-60m", "runners-up", "Pure data parallelism beats TP here",
                  "The dense model of this shape", "per 1B tokens", "GEMMs and attention",
                  "collectives of one process", "peak memory of one GPU"):  # fmt: skip
        assert words in out, words
    assert max(len(line.rstrip()) for line in out.splitlines() if "hardware" not in line) <= 130


def test_what_is_written_loads_and_is_what_was_predicted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file, drawn = tmp_path / "run.toml", tmp_path / "run.svg"
    words = [*SMALL, "--write", str(file), "--parallel.tp", "2", "--parallel.layout", "btp", "--steps", "7"]
    best = facts(capsys, *words)["best"]
    config = load(str(file))
    assert (config.parallel.tp, config.parallel.layout, config.train.steps) == (2, "btp", 7)
    assert config.model_dump() == from_tree(config.model_dump(exclude_none=True)).model_dump()
    assert json.loads(json.dumps(config.model_dump())) == best["config"]
    assert file.read_text(encoding="utf-8").startswith("# Chosen by: boost plan --model cola-60m")
    code, _, err = say(capsys, *words)
    assert code == 2 and "--force" in err and len(err.splitlines()) == 1
    again = facts(capsys, str(file), "--gpu", "a100-80g", "--svg", str(drawn))
    assert again["step_seconds"] == pytest.approx(best["step_seconds"], rel=1e-12)
    assert again["memory_bytes"] == best["memory_bytes"]
    ET.fromstring(drawn.read_text(encoding="utf-8"))
    assert "GEMMs" in drawn.read_text(encoding="utf-8")


def test_flags_make_the_same_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    found = facts(capsys, *SMALL, "--family", "svd", "--parallel.pp", "2")
    words = " ".join(found["command"]).replace("\\", " ").split()
    assert words[:3] == ["boost", "train", "cola-60m"] and words[3:5] == ["--model.family", "svd"]
    assert json.loads(json.dumps(load("cola-60m", words[3:]).model_dump())) == found["best"]["config"]
    config = load("boost-7b", ["--model.family=dense", "--parallel.layout=megatron-sp", "--parallel.shard_outer=false"])
    assert load("boost-7b", flags(config, "boost-7b")) == config


@pytest.mark.parametrize(
    "words",
    [
        "--optim.name adamw",
        "--optim.name muon --optim.muon_lr 0.5 --optim.schedule constant --optim.decay_steps 5",
        "--model.family lax --optim.refresh_only true --model.gate tensor",
    ],
)
def test_flags_say_first_what_selects_a_class(words: str) -> None:
    config = load("loro-60m", words.split())
    again = flags(config, "loro-60m")
    assert load("loro-60m", again) == config
    assert len(again) <= len(words.split()) + 4, "and no key that is at its default"


def test_another_optimizer_takes_its_own_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "loro-60m", "--gpus", "1", "--gpu", "a100-80g", "--global-batch", "64", "--optim.name", "adamw"]
    optim = facts(capsys, *words)["best"]["config"]["optim"]
    assert (optim["name"], optim["schedule"]) == ("adamw", "cosine") and "exact_every" not in optim


def test_questions(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "cola-60m", "--gpus", "1", "--gpu", "a100-80g"]
    found = facts(capsys, *words, "--largest-batch")
    most = {each["recompute"]: each["most"] for each in found["answers"]}
    assert most["none"] < most["low-rank"] <= most["full-block"]
    code, out, _ = say(capsys, *words, "--train.recompute", "none", "--longest-sequence")
    assert code == 0 and "tokens per sequence" in out and "full-block" not in out


@pytest.mark.parametrize(
    ("words", "sequences"),
    [
        ("256", 256),
        ("1M-tokens", 256),
        ("500k-tokens", 128),
        ("4M", 1024),
        ("1000000-tokens", 256),
        ("96-sequences", 96),
    ],
)
def test_global_batches(words: str, sequences: int) -> None:
    assert global_batch(words, 4096, 16) == sequences


def test_a_batch_of_tokens_divides_over_odd_numbers_of_gpus() -> None:
    found = global_batch("1M-tokens", 4096, 7)
    assert found % 7 == 0 and abs(found * 4096 / 1e6 - 1) <= 0.051


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--model", "7b", "--gpus", "16", "--gpu", "a10"], "did you mean 'a100-"),
        (["--model", "7b", "--gpus", "16"], "--gpu is missing"),
        (["--gpus", "16", "--gpu", "a100-80g"], "--model is missing"),
        (["--model", "9b", "--gpus", "16", "--gpu", "a100-80g"], "1b, 3b, 7b, 13b, 30b"),
        ([*SMALL[:3], "0", *SMALL[4:]], "--gpus = 0 is too small"),
        ([*SMALL[:-1], "1X"], "1M-tokens"),
        ([*SMALL[:-1], "100-tokens"], "less than one sequence"),
        ([*SMALL, "--parallel.tp", "3"], "parallel.tp = 3 must divide --gpus = 4; nearest valid value: 2"),
        ([*SMALL, "--parallel.tp", "x"], "parallel.tp"),
        ([*SMALL, "--parallel.tpp", "2"], "unknown key 'parallel.tpp'"),
        ([*SMALL, "--family", "denes"], "model.family"),
        ([*SMALL, "--price", "0"], "--price = 0 must be greater than 0"),
        (["--model", "cola-1b", "--gpus", "2", "--gpu", "a100-80g", "--parallel.tp", "2", "--parallel.layout", "btp"],
         "model.ffn_dim = 5461"),
        (["--model", "30b", "--family", "dense", "--gpus", "1", "--gpu", "a100-80g", "--global-batch", "8"], "it fits on"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = say(capsys, *words)
    assert code == 2 and says in err and len(err.splitlines()) == 1 and not out


def test_no_tp_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--model cola-1b --gpus 2 --gpu a100-80g --global-batch 8 --parallel.layout btp"
    found = facts(capsys, *words.split())
    assert any(note.startswith("No TP: parallel.tp = 2 must divide model.ffn_dim = 5461") for note in found["notes"])


def test_seven_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    found = facts(capsys, "--model", "cola-60m", "--gpus", "7", "--gpu", "a100-80g", "--global-batch", "500k-tokens")
    assert found["best"]["config"]["parallel"]["dp"] == 7


def test_commands_of_two_words(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["plan", "calibrate", "--help"])
    assert left.value.code == 0 and "usage: boost plan calibrate" in capsys.readouterr().out


def test_by_tokens(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("boost.plan.by_tokens.MOST_TOKENS", 8192)
    words = ("--model", "cola-60m", "--gpus", "2", "--gpu", "a100-80g", "--by-tokens", "--svg", str(tmp_path / "x.svg"))
    code, out, err = say(capsys, *words)
    assert code == 0 and not err
    assert "TP 1" in out and "fastest: " in out and " tokens" in out
    assert (tmp_path / "x.svg").read_text().startswith("<?xml")
    found = facts(capsys, *words[:-2])
    assert {each["tp"] for each in found["answers"]} == {1, 2}
    assert any("config" in each for each in found["answers"])


def test_a_picture_needs_matplotlib(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("boost.drawing.importlib.util.find_spec", lambda name: None)
    code, _, err = say(capsys, *SMALL, "--svg", "x.svg")
    assert code == 2 and "pip install 'boost-llm[plots]'" in err and len(err.splitlines()) == 1
