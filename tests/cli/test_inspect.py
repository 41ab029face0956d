"""`boost inspect` for users and programs."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from boost.cli.main import main
from tests.cli.commands import Capture, done, refused, say
from tests.plan.toys import LAYOUTS


def facts(capsys: Capture, *words: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(done(capsys, "inspect", *words, "--json"))
    return result


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("tp", ["2", "8"])
def test_json_and_text_for_every_layout(name: str, tp: str, capsys: Capture) -> None:
    words = [*LAYOUTS[name], "--layout", name.partition(",")[0]]
    found = facts(capsys, "boost-7b", *words, "--tp", tp)
    assert found["layout"] == words[-1] and found["tp"] == int(tp)
    assert found["bytes_per_step"] == sum(c["count"] * c["bytes"] for c in found["collectives"]) > 0
    assert {c["phase"] for c in found["collectives"]} == {"forward", "backward", "step"}
    for weight in found["weights"]:
        ratios = [whole // part for whole, part in zip(weight["global"], weight["local"], strict=True)]
        assert sorted(ratios)[-1] == (int(tp) if weight["cut"].startswith("dim") else 1)
        assert weight["partial"] == weight["cut"].startswith("replicated, gradient")
    out = done(capsys, "inspect", "boost-7b", *words, "--tp", tp)
    assert max(len(line) for line in out.splitlines()) <= 100
    assert "…" not in out
    assert all(weight["name"].removeprefix("layers.N.") in out for weight in found["weights"])


@pytest.mark.parametrize("policy", ["none", "low-rank"])
def test_memory_by_category(policy: str, capsys: Capture) -> None:
    words = ["demo", "--layout", "btp-sp", "--memory", "--train.recompute", policy]
    held = facts(capsys, *words)["memory"]
    assert sum(held["predicted_peak"].values()) > held["predicted"]["residual stream"] > 0
    assert (held["predicted"]["wide activations"] == 0) == (policy != "none")
    table = memory_table(capsys, *words)
    assert f"train.recompute = {policy}" in table
    assert "at the peak" in table and "residual stream" in table


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (["boost-13b", "--pp-rank", "1"], "pipeline buffers"),
        (["boost-7b", "--parallel.dp", "2", "--parallel.shard", "full"], "gathered weights"),
    ],
)
def test_memory_of_stages_and_shards(words: list[str], extra: str, capsys: Capture) -> None:
    words = [*words, "--memory", "--train.global_batch", "8"]
    held = facts(capsys, *words)["memory"]
    assert held["moment"] in ("loss", "backward pass of the loss", "backward pass of a block")
    assert held["predicted_peak"]["latents"] == held["predicted"]["latents"] > 0
    assert held["predicted_peak"][extra] > 0
    table = memory_table(capsys, *words)
    assert f"predicted to occur in this phase: {held['moment']}" in table and extra in table


def memory_table(capsys: Capture, *words: str) -> str:
    out = done(capsys, "inspect", *words)
    assert max(len(line) for line in out.splitlines()) <= 100
    return out[out.index("memory of one process") :]


def test_what_an_exact_step_sends_on_top_is_listed_by_itself(capsys: Capture) -> None:
    words = ["boost-1b", "--tp", "2", "--layout", "btp", "--model.family", "svd"]
    loro, usual = facts(capsys, *words, "--optim.name", "loro"), facts(capsys, *words)
    assert (loro["optimizer"], loro["exact_every"], usual["exact_every"]) == ("loro", 500, 0)
    assert loro["collectives"] == usual["collectives"] and usual["exact_step"] == []
    assert loro["bytes_of_exact_step"] == sum(c["count"] * c["bytes"] for c in loro["exact_step"]) > 0
    out = say(capsys, "inspect", *words, "--optim.name", "loro")[1]
    assert "collectives, every 500 steps, in the exact step" in out and "per exact step" in out
    muon = facts(capsys, *words, "--optim.name", "muon")
    assert next(c["kind"] for c in muon["collectives"] if c["place"] == "optimizer") == "all-reduce"
    assert muon["exact_step"] == []


def test_json_says_what_the_preset_is(capsys: Capture) -> None:
    found = facts(capsys, "boost-7b")
    (weight,) = (weight for weight in found["weights"] if weight["name"] == "layers.N.attn.q.A")
    assert (weight["global"], weight["local"], weight["cut"]) == ([1024, 4096], [1024, 1024], "dim 1 over 4")
    assert (found["tokens"], found["micro_batches"], found["dp"], found["residual"]) == (16384, 1, 1, [16384, 1024])
    first = found["collectives"][0]
    assert first == {
        "phase": "forward", "kind": "all-reduce", "shape": [16384, 3084], "dtype": "bfloat16", "place": "qkv", "processes": 4,
        "count": 32, "bytes": 2 * 16384 * 3084 * 2 * 3 // 4,
    }  # fmt: skip


def test_a_process_of_a_pipeline_holds_its_stages(capsys: Capture, tmp_path: Path) -> None:
    out = say(capsys, "inspect", "boost-13b")[1]
    assert "21, 19 blocks; pipeline rank 0: embedding, blocks 0-20" in out
    first, last = (facts(capsys, "boost-13b", "--pp-rank", rank) for rank in "01")
    assert first["stages"] == [{"index": 0, "first_layer": 0, "layers": 21}]
    down = [
        [c for c in each["collectives"] if (c["phase"], c["place"]) == ("forward", "down")] for each in (first, last)
    ]
    assert [[c["count"] for c in each] for each in down] == [[21 * 4], [19 * 4]]
    ends = [{w["name"] for w in found["weights"]} & {"embed", "head"} for found in (first, last)]
    assert ends == [{"embed"}, {"head"}]
    sends = [
        [(c["phase"], c["bytes"], c["count"]) for c in found["collectives"] if c["kind"] == "send"]
        for found in (first, last)
    ]
    shard = 4096 * 5120 // 4 * 2
    assert sends == [[("forward", shard, 4)], [("backward", shard, 4)]], "the residual shard, not the whole stream"
    held = first["parameters_per_process"] + last["parameters_per_process"]
    assert held == pytest.approx(first["parameters"] / 4, rel=1e-4)
    assert say(capsys, "inspect", "boost-13b", "--pp-rank", "1", "--svg", str(tmp_path / "x.svg"))[0] == 0


def test_shared_weights_are_gathered(capsys: Capture) -> None:
    words = ["boost-7b", "--layout", "btp-sp", "--parallel.dp", "2", "--train.global_batch", "8"]
    alone, shared, outer = (
        facts(capsys, *words, *more)
        for more in ([], ["--parallel.shard", "full"], ["--parallel.shard", "full", "--parallel.shard_outer", "true"])
    )
    assert shared["parameters_per_process"] == pytest.approx(alone["parameters_per_process"] / 2, rel=1e-3)
    assert outer["parameters_per_process"] == pytest.approx(alone["parameters"] / 8, rel=1e-3)
    gathered = [(c["phase"], c["count"]) for c in shared["collectives"] if c["place"] == "weights"]
    assert [sum(n for phase, n in gathered if phase == each) for each in ("forward", "backward")] == [33, 32]
    out = say(capsys, "inspect", *words, "--parallel.shard", "full", "--parallel.shard_outer", "true")[1]
    assert "replicated; rows sharded over 8" in out and "dim 0 over 4; rows sharded over 2" in out


def test_few_key_value_heads_are_explained(capsys: Capture) -> None:
    out = say(capsys, "inspect", "boost-7b", "--model.kv_heads", "2")[1]
    assert "note: model.kv_heads = 2 is less than parallel.tp = 4" in out


def test_one_process_has_no_collectives_and_it_says_so(capsys: Capture) -> None:
    _, out, _ = say(capsys, "inspect", "demo", "--tp", "1")
    assert "parallel.tp = 1: one process holds all weights" in out
    assert "no collectives" in out and "once a step" not in out


def test_a_file_is_inspected_and_drawn(tmp_path: Path, capsys: Capture) -> None:
    _, resolved, _ = (main(["config", "demo"]), *capsys.readouterr())
    (tmp_path / "mine.toml").write_text(resolved)
    picture = tmp_path / "block.svg"
    out = done(capsys, "inspect", str(tmp_path / "mine.toml"), "--layout", "btp-sp", "--svg", str(picture))
    assert out.startswith("model       mine: cola, 4 blocks") and f"{picture} written" in out
    text = picture.read_text(encoding="utf-8")
    assert text.startswith("<?xml") and "btp-sp · mine · TP 2" in text
    assert say(capsys, "inspect", "demo", "--svg", str(tmp_path / "x.bmp"))[0] == 2
    assert say(capsys, "inspect", "demo", "--svg", str(tmp_path / "no" / "x.svg"))[0] != 0


def test_a_picture_needs_matplotlib(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("boost.drawing.importlib.util.find_spec", lambda name: None)
    assert "pip install matplotlib" in refused(capsys, "inspect", "demo", "--svg", "x.svg")


@pytest.mark.slow
def test_it_answers_without_torch() -> None:
    program = (
        "import sys; from boost.cli.main import main; code = main(['inspect', 'boost-30b', '--layout', 'btp-sp', '--json']);"
        "sys.exit(code or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tp"] == 4
