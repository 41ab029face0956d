"""The command line as users see it: help, errors, exit codes."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from boost.cli.main import COMMAND_GROUPS, COMMANDS, main, split_overrides
from boost.cli.terminal import print_rows
from boost.data.report import FileReport
from boost.errors import ConfigError
from tests.cli.commands import Capture, done, say


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as leaving:
        main([*command.split(), "--help"])
    assert leaving.value.code == 0
    text = capsys.readouterr().out
    assert "example" in text
    assert text.startswith(f"usage: boost {command}")


def test_boost_alone_prints_the_commands_in_groups(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, text, err = say(capsys)
    assert (code, err) == (0, "")
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    for heading, names in COMMAND_GROUPS.items():
        start = lines.index(f"{heading}:")
        block = lines[start + 1 : lines.index("", start)]
        listed = [line for line in block if line.startswith("  ") and line[2] != " "]
        assert [line[2:16].rstrip() for line in listed] == list(names)
    with pytest.raises(SystemExit):
        main(["--help"])
    assert capsys.readouterr().out == text


@pytest.mark.slow
def test_help_imports_no_command() -> None:
    code = (
        "import sys; from boost.cli.main import main; main([]);"
        "assert {m for m in sys.modules if m.startswith('boost.cli.')} == {'boost.cli.main'};"
        "assert not {'pydantic', 'numpy', 'rich', 'torch'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_no_more_threads_than_cores(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("boost.cli.main.available_cores", lambda: 2)
    for given, used in (("1000", "2"), ("2", "2"), ("1", "1"), ("4,2", "4,2")):
        monkeypatch.setenv("OMP_NUM_THREADS", given)
        assert main([]) == 0
        assert os.environ["OMP_NUM_THREADS"] == used
        warning = "warning: OMP_NUM_THREADS = 1000 exceeds the number of available cores; using 2\n"
        assert capsys.readouterr().err == (warning if given == "1000" else "")


def test_overrides_are_taken_from_anywhere() -> None:
    words = ["train", "--train.steps", "3", "demo", "--run.dir=x", "--resume", "auto", "--optim.lr", "-1"]
    rest, overrides = split_overrides(words)
    assert rest == ["train", "demo", "--resume", "auto"]
    assert overrides == ["--train.steps", "3", "--run.dir=x", "--optim.lr", "-1"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train", "demo", "--train.stesp", "3"], "unknown key 'train.stesp'; did you mean 'train.steps'?"),
        (["train", "demo", "--steps", "3"], "unknown option '--steps'; did you mean '--train.steps'?"),
        (["train", "demo", "--data.store", "/nowhere/at/all"], "/nowhere/at/all: no token store here"),
        (["eval", "/nowhere"], "no checkpoint at '/nowhere'"),
        (["generate", "x", "--top-p", "0"], "--top-p = 0.0 must be in (0, 1]"),
        (["generate", "x", "--max-tokens", "0"], "--max-tokens = 0 is out of range; nearest valid value: 1"),
        (["generate", "x", "--max-tokens", "1000000000000"], "nearest valid value: 1048576"),
        (["generate", "x", "--temperature", "1e-40"], "--temperature = 1e-40 must be 0 (greedy) or at least 0.0001"),
        (["generate", "x", "--seed", "99999999999999999999999"], "--seed = 99999999999999999999999 must be"),
        (["generate", "x", "--prompt", "\udcff"], "is not valid UTF-8"),
        (["eval", "x", "--batch", "-1"], "--batch = -1 is too small"),
        (["eval", "x", "--max-tokens", "-1"], "--max-tokens = -1 is too small"),
        (["inspect", "demo", "--layout", "btpp"], "parallel.layout = 'btpp' is not one of btp, btp-sp, btp-cp, vanilla, "
         "megatron-sp, megatron, ulysses, single; did you mean 'btp'?"),
        (["inspect", "demo", "--tp", "x"], "parallel.tp = 'x' must be an integer"),
        (["inspect", "boost-13b", "--pp-rank", "2"], "--pp-rank = 2 is out of range for parallel.pp = 2; nearest valid value: 1"),
        (["train", "run.toml"], "named 'run.toml'; 'boost config' lists the presets"),
        (["train", "--fp8"], "unknown option '--fp8'; 'boost config --fields' lists all keys"),
        (["plan", "--fp8", "true"], "unknown option '--fp8'"),
        (["trian", "demo"], "unknown command 'trian'; did you mean 'train'?"),
        (["xyz"], "unknown command 'xyz'; see boost --help"),
        (["--debug", "trian"], "unknown command 'trian'; did you mean 'train'?"),
        (["inspect", "demo", "--svg", "x.txt"], "'x.txt' is not a valid picture file name; use one that ends with .svg"),
        (["plan", "demo", "--gpu", "h100", "--gpus", "8", "--model", "30b"], "--model applies only to a search, but explaining"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_a_mistake_is_one_line_and_exit_code_2(
    words: list[str], expected: str, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where `make train` has run, the demo's run directory is another mistake
    code, out, err = say(capsys, *words)
    assert code == 2
    assert out == ""
    assert err.startswith("boost: error: ")
    assert err.count("\n") == 1
    assert expected in err


@pytest.mark.parametrize(
    "words", ["config nothing --debug", "--debug config nothing", "--debug plan calibrate --nproc 0"]
)
def test_debug_shows_the_traceback(words: str) -> None:
    with pytest.raises(ConfigError, match="nothing|--nproc"):
        main(words.split())


def test_config_prints_what_train_takes(tmp_path: Path, capsys: Capture) -> None:
    resolved = done(capsys, "config", "cola-1b", "--parallel.tp", "4", "--model.ffn_dim", "5472")
    (tmp_path / "run.toml").write_text(resolved)
    assert say(capsys, "config", str(tmp_path / "run.toml"))[1] == resolved
    assert say(capsys, "config", str(tmp_path / "run.toml"), "--check")[0] == 0
    as_json = json.loads(say(capsys, "config", "cola-1b", "--json")[1])
    assert as_json["model"]["ffn_dim"] == 5461


def test_config_lists_presets_and_fields(capsys: Capture) -> None:
    presets = {row["preset"]: row for row in json.loads(say(capsys, "config", "--json")[1])}
    assert presets["boost-7b"]["tp"] == 4
    lines = say(capsys, "config")[1].splitlines()
    for name, row in presets.items():
        (described,) = [line for line in lines if line.split()[:1] == [name]]
        assert described.rstrip().endswith(row["what"]) and 10 < len(row["what"]) <= 80, name
    fields = say(capsys, "config", "--fields")[1]
    assert "parallel.norm: online | sync" in fields


def test_other_commands_take_no_overrides(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["eval", "x", "--train.steps", "3"])
    assert leaving.value.code == 2
    assert "unrecognized arguments: --train.steps 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["config", "\x1b[2Jx.toml"],
        ["config", "--\x1b[2J.x", "1"],
        ["config", "demo", "--model.\x1b[2J", "1"],
        ["config", "\x1b[2J", "y"],
    ],
)
def test_escape_codes_in_words_do_not_reach_the_terminal(words: list[str], capsys: Capture) -> None:
    with contextlib.suppress(SystemExit):
        assert main(words) == 2
    captured = capsys.readouterr()
    assert "\x1b" not in captured.out + captured.err and "\\x1b[2J" in captured.err


@pytest.mark.parametrize(
    ("words", "end"),
    [
        (["config", "demo", f"--model.{'w' * 10**6}", "1"], "lists all keys"),
        (["config", "demo", f"--model.ranks.{'w ' * 10**6}", "1"], "for one block"),
        (["eval", "x", "--train.steps", "w" * 10**6], "(see boost eval --help)"),
        (["checkpoint", "w" * 10**6], "(choose from 'list', 'verify')"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_beginning_and_the_end_of_a_long_error_are_printed(words: list[str], end: str, capsys: Capture) -> None:
    with contextlib.suppress(SystemExit):
        assert main(words) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert len(line) < 5000 and "error: " in line[:30] and " characters) ... " in line and line.endswith(end)


def test_escape_codes_in_names_do_not_reach_the_terminal(
    checkpoint: Path, store: Path, tmp_path: Path, capsys: Capture
) -> None:
    evil = tmp_path / "r\x1b[2J\u202eevil"
    shutil.copytree(checkpoint, evil / "checkpoints" / "step-00000000")
    (evil / "checkpoints" / "step-00000001\x1b]0;x\x07").mkdir()
    for words in (
        ("checkpoint", "list", evil),
        ("checkpoint", "verify", evil),
        ("eval", evil, "--store", store, "--max-tokens", 64),
        ("export", evil, "--out", tmp_path / "o\x1b[2J"),
    ):
        code, out, err = say(capsys, *words)
        assert code == 0, (words, err)
        assert "\x1b" not in out + err and "\u202e" not in out + err and "\x07" not in out + err
        assert "\\x1b[2J" in out or words[0] == "checkpoint"
    print_rows(("name",), [["b\u202e"]])
    assert capsys.readouterr().out.split() == ["name", "b\\u202e"]
    report = FileReport("c\x1b")
    report.skip("d\x1b", "e\x1b")
    assert list(report.skipped) == ["d\\x1b"]
