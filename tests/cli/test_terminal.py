"""Results on a narrow terminal: wrapped at words, never truncated."""

import io

from rich.console import Console
from rich.table import Table

from boost.cli.terminal import print_fact, print_table


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
