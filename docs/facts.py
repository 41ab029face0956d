"""Rewrites the measured and predicted figures in the pages from the result files: `python docs/facts.py`.

A figure links to its source file, so its command, commit and machine are one click away. The link's title identifies the table and
cell:

    [2.01 (1.95 to 2.05)](../benchmarks/results/ladder.md "share-matched wire > btp, online > over the first step")

- In a Markdown result: `TABLE > ROW > COLUMN`. TABLE is the beginning of the text above the table and may be omitted. ROW is the
  first cell of the row; other cells may follow, joined by ` + `, and `weighted...` is a cell that begins with "weighted". COLUMN
  is a heading (the first of several equal ones) or its beginning.
- In a JSON result: the keys that lead to a number, joined by ` > `. A list of numbers stands for its median.
- In CITATION.cff: a key.

A figure with an interval or a spread is the whole cell; otherwise, it is the cell's first number. `tests/test_docs.py` checks all
figures.
"""

import json
import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FACT = re.compile(r"\[(?P<text>[^\]\[]+)\]\((?P<link>[^)\s\"]+\.(?:md|json|cff)) \"(?P<key>[^\"]+)\"\)")
NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")


def pages() -> list[Path]:
    """The pages whose figures come from result files."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def tables(text: str) -> Iterator[tuple[str, list[list[str]]]]:
    """Yields (text above, rows of cells starting with the headings) for every table in a Markdown result."""
    above, rows = "", []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("| ").split(" | ")])
            continue
        if rows:
            yield above, [rows[0], *rows[2:]]
            rows = []
        above = line or above


def cell(text: str, key: str) -> str:
    """The cell of a Markdown result that `key` refers to. Raises KeyError unless it refers to exactly one value."""
    *table, row, column = key.split(" > ")
    found = set()
    for above, (headings, *rows) in tables(text):
        if table and not above.startswith(table[0]):
            continue
        at = [headings.index(column)] if column in headings else []
        at = at or [i for i, heading in enumerate(headings) if heading.startswith(column)]
        first, *others = row.split(" + ")
        for cells in rows:
            if cells[0] == first and all(any(is_meant(each, other) for each in cells) for other in others):
                found |= {cells[i] for i in at if i < len(cells)}
    if len(found) != 1:
        raise KeyError(f"'{key}' means {len(found)} values: {sorted(found)}")
    return found.pop()


def is_meant(cell: str, part: str) -> bool:
    """Whether a part of a key matches a cell."""
    return cell.startswith(part[:-3]) if part.endswith("...") else cell == part


def number(facts: Any, key: str) -> float:
    """The number in a JSON result that `key` refers to. Raises KeyError if there is none."""
    for part in key.split(" > "):
        try:
            facts = facts[int(part) if isinstance(facts, list) else part]
        except (IndexError, ValueError, KeyError, TypeError):
            raise KeyError(f"'{key}': no '{part}'") from None
    return statistics.median(facts) if isinstance(facts, list) else float(facts)


def as_written(value: float, text: str) -> str:
    """Formats a number with the digits and notation of `text`."""
    percent = text.endswith("%")
    value *= 100 if percent else 1
    digits = text.rstrip("%").partition(".")[2]
    if "e" in text:
        mantissa, exponent = f"{value:.{len(digits.partition('e')[0])}e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{value:{',' if ',' in text or value >= 10_000 else ''}.{len(digits)}f}" + "%" * percent


def current(text: str, path: Path, key: str) -> str:
    """The current value of the figure `text` in its result file. Raises KeyError if the file has no such figure."""
    content = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        return as_written(number(json.loads(content), key), text)
    if path.suffix == ".cff":
        return content.partition(f"\n{key}: ")[2].partition("\n")[0]
    whole = cell(content, key)
    if any(mark in text for mark in ("(", "±", " / ", " to ", " of ")):
        return whole
    first = NUMBER.search(whole)
    if first is None:
        raise KeyError(f"'{key}' is '{whole}', which has no number")
    return first[0] + "%" * text.endswith("%")


def updated(page: Path) -> tuple[str, list[str]]:
    """A page's text with all figures updated from their result files, and the lookups that failed."""
    problems = []

    def one(match: re.Match[str]) -> str:
        try:
            now = current(match["text"], (page.parent / match["link"]).resolve(), match["key"])
        except (KeyError, OSError) as error:
            problems.append(f"{match['link']}: {error.args[0]}")
            return match[0]
        return f'[{now}]({match["link"]} "{match["key"]}")'

    return FACT.sub(one, page.read_text(encoding="utf-8")), problems


if __name__ == "__main__":
    wrong = []
    for path in pages():
        new, problems = updated(path)
        wrong += [f"{path.relative_to(ROOT)}: {problem}" for problem in problems]
        path.write_text(new, encoding="utf-8")
    sys.exit("\n".join(wrong) or 0)
