"""Numbers as text, and that no other module formats units by hand."""

import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from boost import format as fmt

ROOT = Path(__file__).parent.parent / "boost"


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: fmt.format_bytes(0), "0 B"),
        (lambda: fmt.format_bytes(999), "999 B"),
        (lambda: fmt.format_bytes(1000), "1 kB"),
        (lambda: fmt.format_bytes(151584768), "152 MB"),
        (lambda: fmt.format_bytes(999.6e6), "1 GB"),
        (lambda: fmt.format_bytes(5e18), "5,000 PB"),
        (lambda: fmt.format_bytes(1.2 * 2**30, 2), "1.3 GB"),
        (lambda: fmt.format_bytes(math.nan), "n/a"),
        (lambda: fmt.format_count(0), "0"),
        (lambda: fmt.format_count(8123), "8.12k"),
        (lambda: fmt.format_count(8123, 2), "8.1k"),
        (lambda: fmt.format_count(12345, 2), "12k"),
        (lambda: fmt.format_count(999_499), "999k"),
        (lambda: fmt.format_count(999_600), "1M"),
        (lambda: fmt.format_count(6_738_415_616), "6.74B"),
        (lambda: fmt.format_count(7e15), "7,000T"),
        (lambda: fmt.format_count(math.inf), "n/a"),
        (lambda: fmt.format_rate(8123), "8.12k tok/s"),
        (lambda: fmt.format_rate(math.nan), "n/a tok/s"),
        (lambda: fmt.format_seconds(7.7), "7.70 s"),
        (lambda: fmt.format_seconds(0.4119), "412 ms"),
        (lambda: fmt.format_seconds(88e-6), "88.0 us"),
        (lambda: fmt.format_seconds(1234.5), "1,234 s"),
        (lambda: fmt.format_seconds(0.9996), "1.00 s"),
        (lambda: fmt.format_seconds(0), "0 s"),
        (lambda: fmt.format_seconds(math.inf), "-"),
        (lambda: fmt.format_duration(0), "0:00"),
        (lambda: fmt.format_duration(59.6), "1:00"),
        (lambda: fmt.format_duration(201), "3:21"),
        (lambda: fmt.format_duration(7401), "2:03:21"),
        (lambda: fmt.format_duration(3 * 86400 + 14400), "3d 4:00:00"),
        (lambda: fmt.format_duration(-1), "0:00"),
        (lambda: fmt.format_duration(math.nan), "-"),
        (lambda: fmt.format_percent(0.4123), "41.2%"),
        (lambda: fmt.format_percent(math.nan), "n/a"),
    ],
)
def test_numbers_as_text(call: Callable[[], str], text: str) -> None:
    assert call() == text


BY_HAND = re.compile(
    r"\{[^{}]*(/ ?1e[69]\b|>> ?[23]0\b|/ ?\(?1024|/ ?2 ?\*\* ?[23]0)[^{}]*\}|\b[KMGT]iB\b.*\{|\{.*\b[KMGT]iB\b|\} %"
)
"""A unit that an f-string computes, a binary unit next to a value, a percentage with a space."""


def test_units_are_formatted_in_one_module() -> None:
    found = []
    for file in sorted(set(ROOT.rglob("*.py")) - {ROOT / "format.py"}):
        name = file.relative_to(ROOT).as_posix()
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
            if BY_HAND.search(line) and re.search(r"""\bf["']""", line):
                found.append(f"{name}:{number}: {line.strip()}")
    assert found == []
