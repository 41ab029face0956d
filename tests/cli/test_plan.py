"""`boost plan` for users and programs."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from boost.cli.main import main
from boost.cli.plan import global_batch
from boost.cli.plan_report import _wrapped, flags
from boost.config import load
from boost.config.load import from_tree
from boost.config.schema import ModelConfig
from boost.config.section import Natural
from boost.data.store import TokenStore
from boost.families import CoLAConfig
from boost.plan.candidates import Request
from boost.plan.search import max_peak, tie_limit
from tests.cli.commands import Capture, done, refused, say

SMALL = ["--model", "cola-60m", "--gpus", "4", "--gpu", "a100-80g", "--global-batch", "64"]
SIMPLE = ("--parallel.pp", "1", "--train.recompute", "none")
"""For a smaller search."""
ON_H100 = [*SMALL[:5], "h100-80g", *SMALL[6:]]


def facts(capsys: Capture, *words: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(done(capsys, "plan", *words, "--json"))
    return result


def test_json_is_a_plan_that_fits_and_loads(capsys: Capture) -> None:
    found = facts(capsys, *SMALL)
    best = found["best"]
    assert best["memory_margin"] == 0.08
    tables = best["config"].items()
    config = from_tree({name: {k: v for k, v in table.items() if v is not None} for name, table in tables})
    assert (config.parallel.world_size, config.train.global_batch, config.train.compute_dtype) == (4, 64, "bfloat16")
    assert max_peak(config, on_gpu=True)[0].total == best["memory_bytes"] <= best["usable_bytes"]
    assert sum(best["step_parts"].values()) == pytest.approx(best["step_seconds"])
    tokens = best["tokens_per_second"]
    assert found["tokens"] == 64 * 256 == pytest.approx(tokens * best["step_seconds"])
    assert found["runners_up"]
    assert all(tie_limit(each["step_seconds"]) >= best["step_seconds"] for each in found["runners_up"])


def test_the_report_says_how_to_run_it_and_why(capsys: Capture) -> None:
    out = done(capsys, "plan", *SMALL, "--explain", "--train.steps", "3600")
    for words in ("3,600 steps take", "GPU-hours",
                  "fastest configuration that fits", "boost train cola-60m", "runners-up", "Pure data parallelism beats TP here",
                  "The dense model of this shape", "GEMMs and attention",
                  "collectives per step on one process", "peak memory on one GPU"):  # fmt: skip
        assert words in out, words
    assert max(len(line.rstrip()) for line in out.splitlines() if "hardware" not in line) <= 130


def test_what_is_written_loads_and_is_what_was_predicted(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    words = [*SMALL, "--write", str(file), "--parallel.tp", "2", "--parallel.layout", "btp", "--train.steps", "7"]
    best = facts(capsys, *words)["best"]
    config = load(str(file))
    assert (config.parallel.tp, config.parallel.layout, config.train.steps) == (2, "btp", 7)
    assert config.model_dump() == from_tree(config.model_dump(exclude_none=True)).model_dump()
    assert json.loads(json.dumps(config.model_dump())) == best["config"]
    assert file.read_text(encoding="utf-8").startswith("# Chosen by: boost plan --model cola-60m")
    assert "--force" in refused(capsys, "plan", *words)
    again = facts(capsys, str(file), "--gpu", "a100-80g")
    assert again["step_seconds"] == pytest.approx(best["step_seconds"], rel=1e-12)
    assert again["memory_bytes"] == best["memory_bytes"]


def test_flags_make_the_same_configuration(capsys: Capture) -> None:
    found = facts(capsys, *SMALL, "--model.family", "svd", "--parallel.pp", "2")
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
        "--optim.name adamw --model.family lax --model.gate tensor",
    ],
)
def test_flags_say_first_what_selects_a_class(words: str) -> None:
    config = load("loro-60m", words.split())
    again = flags(config, "loro-60m")
    assert load("loro-60m", again) == config
    assert len(again) <= len(words.split()) + 4, "and no key that is at its default"


@pytest.mark.parametrize(
    ("words", "sequences"),
    [("256", 256), ("1M-tokens", 256), ("500k-tokens", 128), ("4M", 1024), ("96-sequences", 96)],
)
def test_global_batches(words: str, sequences: int) -> None:
    assert global_batch(words, 4096, 16) == sequences


def test_a_batch_of_tokens_divides_over_odd_numbers_of_gpus() -> None:
    found = global_batch("1M-tokens", 4096, 7)
    assert found % 7 == 0 and abs(found * 4096 / 1e6 - 1) <= 0.051


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--model", "7b", "--gpus", "16", "--gpu", "h10"], "is not a hardware profile; did you mean 'h100-"),
        (["--model", "7b", "--gpus", "16", "--gpu", "a10"], "--gpu = 'a10' is not supported; valid profiles: "),
        (["--model", "7b", "--gpus", "16"], "--gpu is missing"),
        (["--gpus", "16", "--gpu", "a100-80g"], "--model is missing"),
        (["--model", "9b", "--gpus", "16", "--gpu", "a100-80g"], "1b, 3b, 7b, 13b, 30b"),
        (["--model", "60m", "--gpus", "16", "--gpu", "a100-80g"], "did you mean 'cola-60m'?"),
        ([*SMALL[:3], "0", *SMALL[4:]], "--gpus = 0 is too small"),
        ([*SMALL[:-1], "1X"], "1M-tokens"),
        ([*SMALL[:-1], "100-tokens"], "less than one sequence"),
        ([*SMALL, "--parallel.tp", "3"], "parallel.tp = 3 must divide --gpus = 4; nearest valid value: 2"),
        ([*SMALL, "--memory-margin", "1.1"], "--memory-margin = 1.1 must be at least 0 and less than 1"),
        (["--model", "cola-1b", "--gpus", "2", "--gpu", "a100-80g", "--parallel.tp", "2", "--parallel.layout", "btp"],
         "model.ffn_dim = 5461"),
        (["--model", "llama3-8b", "--gpus", "2", "--gpu", "rtx4090", "--global-batch", "2", "--seq", "512", "--model.layers", "18"],
         "it fits with --train.param_dtype bfloat16: "),
        (["--model", "7b", "--model.family", "dense", "--gpus", "1", "--gpu", "a100-40g-8", "--global-batch", "2"], "it fits on"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(words: list[str], says: str, capsys: Capture) -> None:
    code, out, err = say(capsys, "plan", *words)
    assert code == 2 and says in err and len(err.splitlines()) == 1 and not out


def test_no_tp_is_explained(capsys: Capture) -> None:
    words = "--model cola-1b --gpus 2 --gpu a100-80g --global-batch 8 --parallel.layout btp"
    found = facts(capsys, *words.split())
    assert any(note.startswith("No TP: parallel.tp = 2 must divide model.ffn_dim = 5461") for note in found["notes"])
    one = facts(capsys, *SMALL[:3], "1", *SMALL[4:])
    assert not any(note.startswith("No TP") for note in one["notes"]), "one GPU has no TP to explain"


@pytest.mark.slow
def test_fewer_gpus_are_faster_over_a_slow_link(capsys: Capture) -> None:
    card = "tflops=165,mem=24,bw=1008,per_node=2,site=1"
    words = ["--model", "cola-60m", "--gpus", "4", "--gpu", card, "--global-batch", "64"]
    found = facts(capsys, *words)
    assert found["best"]["config"]["parallel"]["dp"] == 2 and found["gpus"] == 4
    assert any(note.startswith("Using only 2 of the 4 GPUs is faster than using all ") for note in found["notes"])
    large = ["--model", "1b", *SMALL[2:], "--parallel.layout", "btp", "--parallel.pp", "1"]
    assert not any("of the 4 GPUs" in note for note in facts(capsys, *large)["notes"])


@pytest.mark.slow
def test_a_near_tie_is_one_with_the_plan(capsys: Capture) -> None:
    """16 sequences on 20 GPUs: the plan uses 16 of them, and the note is not about a plan on all."""
    found = facts(capsys, "--model", "1b", "--gpus", "20", "--gpu", "a100-80g-8", "--global-batch", "16")
    assert found["best"]["config"]["parallel"]["dp"] == 16
    ties = [note for note in found["notes"] if note.startswith("A near-tie: ")]
    assert ties and all(note.startswith("A near-tie: DP 16 ") for note in ties)


@pytest.mark.slow
def test_batches_that_divide_are_named(capsys: Capture) -> None:
    words = ["--model", "1b", "--gpus", "8", "--gpu", "a100-80g-8", *SIMPLE]
    (note,) = (note for note in facts(capsys, *words, "--global-batch", "17")["notes"] if "do not divide" in note)
    assert re.fullmatch(
        r"17 sequences do not divide over 8 GPUs: 16 or 24 take \d+% and \d+% less time per sequence.", note
    )
    assert not any("do not divide" in note for note in facts(capsys, *words, "--global-batch", "16")["notes"])


def test_a_host_has_fewer_processes_than_an_nvlink_domain(capsys: Capture) -> None:
    """A GB200 rack: TP may span 64 GPUs, but a tray with four of them starts four processes."""
    words = ["--model", "cola-60m", "--gpus", "64", "--gpu", "gb200", *SIMPLE, "--global-batch", "64"]
    assert "--nnodes 16 --nproc-per-node 4" in " ".join(facts(capsys, *words)["command"])
    assert "--nnodes" not in " ".join(facts(capsys, *words, "--per-node", "64")["command"])


@pytest.mark.slow
def test_a_tie_goes_to_the_simpler_plan(capsys: Capture) -> None:
    """60M on eight GPUs: plain data parallelism, although sharding the optimizer saves a little of its time."""
    found = facts(capsys, "--model", "cola-60m", "--gpus", "8", "--gpu", "h100-80g", "--parallel.pp", "1")
    parallel = found["best"]["config"]["parallel"]
    assert (parallel["dp"], parallel["shard"], parallel["overlap"]) == (8, "none", "none")
    faster = [each for each in found["runners_up"] if each["step_seconds"] < found["best"]["step_seconds"]]
    assert any(note.startswith("A near-tie: ") for note in found["notes"]) or not faster


# What the report says besides the best configuration, and what --write decides.


def test_json_says_what_was_asked_and_how_sure_it_is(capsys: Capture) -> None:
    """MFU in both conventions, by hand: 6 d L FLOPs per token and block for the masked half of the scores."""
    found = facts(capsys, *ON_H100, "--memory-margin", "0.2")
    assert found["schema"] == 5 and found["argv"][:3] == ["plan", "--model", "cola-60m"]
    best = found["best"]
    assert best["memory_margin"] == 0.2
    low, high = best["step_seconds_interval"]
    assert low < best["step_seconds"] < high and 0.5 < best["fits_probability"] <= 1.0
    model, train = best["config"]["model"], best["config"]["train"]
    masked = 6 * model["dim"] * train["seq_len"] * model["layers"] * best["tokens_per_second"]
    assert best["mfu_of_all_scores"] - best["mfu"] == pytest.approx(masked / (4 * 989.4e12))


def test_a_written_file_evaluates_and_says_what_is_undecided(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    fixed = ["--parallel.pp", "1", "--train.recompute", "none"]
    said = done(capsys, "plan", "--model", "1b", *ON_H100[2:], *fixed, "--write", path)
    text = path.read_text(encoding="utf-8")
    decided = ("optim.lr", "not tuned", "train.steps", "per parameter", "data.store", "checkpoints every 30 minutes")
    for words in decided:
        assert words in said and words in text, words
    config = load(str(path))
    assert config.train.eval_every == max(config.train.steps // 20, 1) and config.train.eval_tokens == 2**20
    assert config.run.dir == "runs/boost-1b"  # of the preset; only the default is changed


def test_a_store_gives_its_vocabulary(capsys: Capture, store: Path, tmp_path: Path) -> None:
    path, fixed = tmp_path / "mine.toml", ["--parallel.tp", "1", "--train.recompute", "none"]
    code, said, _ = say(capsys, "plan", *SMALL, *fixed, "--data.store", store, "--write", path)
    assert code == 0 and f"one pass over {store} " in " ".join(said.split())
    assert TokenStore.open(store).vocab_size == 300 and load(str(path)).model.vocab_size == 320  # a multiple of 64
    for words, size in ((["--model.vocab_size", "4096"], 4096), (["--data.store", str(tmp_path / "none")], 32000)):
        found = facts(capsys, *SMALL, *fixed, "--data.store", str(store), *words)
        assert found["best"]["config"]["model"]["vocab_size"] == size


def test_what_was_asked_for_stays(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    asked = ["--optim.lr", "0.003", "--train.steps", "700", "--train.eval_every", "33", "--run.dir", "runs/other"]
    code, said, _ = say(capsys, "plan", *ON_H100, "--write", path, *asked)
    assert code == 0 and "not tuned" not in said and "per parameter" not in said
    config = load(str(path))
    train = config.train
    assert (config.optim.lr, train.steps, train.eval_every, config.run.dir) == (0.003, 700, 33, "runs/other")


@pytest.mark.parametrize(
    ("words", "batch"),
    [("1b --seq 4096", 128), ("7b --seq 4096", 256), ("cola-60m", load("cola-60m").train.global_batch)],
)
def test_a_batch_that_nobody_asked_for_is_a_realistic_one(
    words: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPT-3's batch for the parameter count if the preset has none for training; otherwise the recipe's own."""
    asked: list[Request] = []
    monkeypatch.setattr("boost.cli.plan_report.search_and_report", lambda _, request, *rest: asked.append(request))
    main(["plan", "--gpus", "8", "--gpu", "h100-80g", "--model", *words.split()])
    assert asked[0].base.train.global_batch == batch


@pytest.mark.slow
def test_the_same_question_has_the_same_answer(capsys: Capture) -> None:
    """Identical to the last digit in a process with another hash seed."""
    words = [*SMALL, "--parallel.pp", "1", "--parallel.overlap", "none"]
    command = [sys.executable, "-m", "boost.cli.main", "plan", *words, "--json"]
    said = subprocess.check_output(command, env={**os.environ, "PYTHONHASHSEED": "1"}, text=True)
    assert say(capsys, "plan", *words, "--json") == (0, said, "")


def test_a_hugging_face_config_is_a_model(capsys: Capture, tmp_path: Path) -> None:
    """From a folder or its config.json, as is or as a low-rank family of the same shape; the written file can be run."""
    shape = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 4, "num_attention_heads": 8}
    content = {"model_type": "llama", **shape, "num_key_value_heads": 4, "vocab_size": 32000}
    content |= {"max_position_embeddings": 1024, "rms_norm_eps": 1e-5}
    (tmp_path / "config.json").write_text(json.dumps(content), encoding="utf-8")
    words = ["--gpus", "2", "--gpu", "h100", "--parallel.pp", "1", "--train.recompute", "none"]
    best = facts(capsys, "--model", str(tmp_path), *words)["best"]["config"]
    assert (best["model"]["family"], best["model"]["kv_heads"], best["train"]["seq_len"]) == ("dense", 4, 1024)
    path = tmp_path / "run.toml"
    cola = ["--model", str(tmp_path / "config.json"), "--model.family", "cola", "--write", str(path)]
    code, out, _ = say(capsys, "plan", *cola, *words)
    assert code == 0 and "untie" not in out
    config = load(str(path))
    assert (config.model.family, config.model.rank, config.model.layers) == ("cola", 128, 4)
    assert config.run.dir == "runs/run"
    (tmp_path / "config.json").write_text(json.dumps(content | {"tie_word_embeddings": True}), encoding="utf-8")
    code, out, _ = say(capsys, "plan", "--model", str(tmp_path), *words)
    assert code == 0 and "command (after --write run.toml)" in out and "boost train run.toml" in out
    assert facts(capsys, "--model", str(tmp_path), *words)["best"]["config"]["model"]["tied"] is True
    (tmp_path / "config.json").write_text(json.dumps(content | {"model_type": "gpt2"}), encoding="utf-8")
    assert "model_type = 'gpt2'" in refused(capsys, "plan", "--model", str(tmp_path), *words)


def test_a_family_of_another_package(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a field of its own and a rule that reads the mesh; it is compared with the dense model of its shape."""
    monkeypatch.setattr(ModelConfig, "choices", dict(ModelConfig.choices))

    class Narrow(CoLAConfig):
        family: Literal["narrow"] = "narrow"
        own_field: Natural = 3

        def problems(self, config: Any) -> Iterator[str]:
            if config.parallel.dp > 2:
                yield "too many replicas"

    result = facts(capsys, *SMALL, "--model.family", "narrow", "--model.own_field", "4", "--parallel.pp", "1")
    plans = [result["best"], *result["runners_up"]]
    assert max(plan["config"]["parallel"]["dp"] for plan in plans) == 2
    assert any(note.startswith("The dense model of this shape") for note in result["notes"])
    assert all(words in result["command"][0] for words in ("--model.family narrow", "--model.own_field 4"))


@pytest.mark.nightly
def test_the_plan_in_the_readme_is_what_its_command_prints(capsys: Capture) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    _, _, rest = readme.partition("    boost plan ")
    words, _, rest = rest.partition("\n")
    _, _, rest = rest.partition(":\n\n")
    shown = [line.strip() for line in rest.partition("\n\n")[0].splitlines()]
    code, out, err = say(capsys, "plan", *words.split())
    printed = " ".join(out.split())
    assert code == 0 and len(shown) == 6, err
    assert [line for line in shown if " ".join(line.split()) not in printed] == []


def test_a_launch_command_is_read_as_it_was_meant() -> None:
    words = ["train", "demo", "--run.dir", "/data/my --runs/a\tb", "--optim.lr", "1e-3"]
    words += [*("--train.steps", "100000") * 5, "--yes"]
    lines = _wrapped("boost", words)
    assert len(lines) > 1 and max(map(len, lines)) <= 110
    said = subprocess.run(
        ["sh", "-c", "printf '%s\\n' " + "\n".join(lines)], capture_output=True, text=True, check=True
    )
    assert said.stdout.splitlines() == ["boost", *words]
