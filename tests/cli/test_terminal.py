"""Results on a 60-column terminal: wrapped at words, never truncated."""

import io
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from boost.cli.main import main
from boost.cli.terminal import print_fact, print_table

WIDTH = 60


@pytest.fixture
def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Runs a command with stdout on a terminal of 60 columns and returns its lines."""
    for name, value in {"COLUMNS": str(WIDTH), "NO_COLOR": "1", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)

    def run(*words: str) -> list[str]:
        terminal = io.StringIO()
        terminal.isatty = lambda: True  # type: ignore[method-assign]
        with monkeypatch.context() as patch:
            patch.setattr("sys.stdout", terminal)
            assert main(list(words)) == 0
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.getvalue()).splitlines()

    return run


def test_tables_of_inspect_and_config_fit(on_terminal: Callable[..., list[str]], tmp_path: Path) -> None:
    for words in (("inspect", "demo"), ("inspect", "boost-7b"), ("config",)):
        lines = on_terminal(*words)
        assert lines
        assert max(map(len, lines)) <= WIDTH, words
        assert not any("…" in line for line in lines), words
    text = " ".join("\n".join(on_terminal("inspect", "boost-7b")).split())
    for words in ("[11008, 1024]", "reduce-scatter", "replicated, gradient summed once per step", "per micro-batch"):
        assert words in text
    assert "boost-7b" in on_terminal("config")


def test_a_plan_fits_except_its_command(on_terminal: Callable[..., list[str]]) -> None:
    words = ["plan", "--model", "1b", "--gpus", "2", "--gpu", "a100", "--seq", "2048", "--global-batch", "8"]
    lines = on_terminal(*words, "--explain")
    start = next(number for number, line in enumerate(lines) if line.startswith("command"))
    end = lines.index("", start)
    assert max(len(line) for line in lines[:start] + lines[end:]) <= WIDTH
    assert not any("…" in line for line in lines)


def console(width: int) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None, _environ={})


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def table() -> Table:
    made = Table(box=None, pad_edge=False)
    for heading in ("name", "shape", "meaning"):
        made.add_column(heading)
    made.add_row("attn.q.A", "[1024, 4096]", "the first factor of the query projection, sharded")
    return made


def test_a_table_folds_its_last_column_then_becomes_a_list() -> None:
    wide, medium, narrow = console(100), console(50), console(30)
    for each in (wide, medium, narrow):
        print_table(each, table())
    assert text_of(wide).count("\n") == 2
    assert "attn.q.A  [1024, 4096]  the first factor" in text_of(medium)
    assert text_of(narrow).splitlines() == [
        "attn.q.A",
        "  shape    [1024, 4096]",
        "  meaning  the first factor of",
        "           the query",
        "           projection, sharded",
    ]


def test_a_fact_folds_under_itself_and_is_one_line_for_a_pipe() -> None:
    narrow = console(30)
    print_fact(narrow, "memory", "59.6 GB of 81 GB usable per GPU")
    assert text_of(narrow) == "memory      59.6 GB of 81 GB\n            usable per GPU\n"
    pipe = Console(file=io.StringIO(), force_terminal=False, width=30)
    print_fact(pipe, "memory", "59.6 GB of 81 GB usable per GPU")
    assert text_of(pipe) == "memory      59.6 GB of 81 GB usable per GPU\n"
