"""benchmarks/gpu/corpus.py: what becomes text, without packages."""

import gzip
import re
import tomllib
from pathlib import Path

from benchmarks.gpu.corpus import LIST, documents, is_english, paragraphs, prose

SENTENCE = "The size of the buffer is the number of bytes that are read in one call, and it is set to zero for a file."


def test_markup_is_removed() -> None:
    page = "<head><title>x</title></head><p>Tom &amp; the <b>bold</b>\nones</p><script>var a = 1;</script><p>Next</p>"
    assert prose("a.html", page).split("\n\n")[-1].strip() == "" and "var a" not in prose("a.html", page)
    assert " ".join(prose("a.html", page).split()) == "Tom & the bold ones Next"
    assert " ".join(prose("ls.1.gz", '.SH NAME\n.B ls\nlist \\fIdirectory\\fR\\-contents\n.\\" comment\n').split()) == (
        "ls list directory-contents"
    )
    assert prose("a.txt", "<p>") == "<p>"


def test_prose_is_english() -> None:
    assert is_english(SENTENCE)
    assert not is_english(
        "int main(void) { return printf(format, value) ; } struct page *page = alloc(order, flags, zone);"
    )
    assert not is_english(
        "Der Puffer hat eine feste Anzahl von Bytes, und er wird mit jedem Aufruf neu gelesen und geschrieben."
    )


def test_what_was_seen_is_dropped(tmp_path: Path) -> None:
    lines = [f"{number}: {SENTENCE}" for number in range(6)]
    (tmp_path / "a.txt").write_text("\n\n".join(lines))
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress("\n\n".join([*lines, *(line + "!" for line in lines)]).encode()))
    (tmp_path / "c.bin").write_text(SENTENCE * 9)
    (tmp_path / "changelog.gz").write_bytes(gzip.compress((SENTENCE * 9).encode()))
    first, second = documents(tmp_path, set())
    assert list(paragraphs(first)) == lines and list(paragraphs(second)) == [line + "!" for line in lines]


def test_every_package_has_a_version() -> None:
    packages = tomllib.loads(LIST.read_text(encoding="utf-8"))["packages"]
    assert len(packages) > 20
    assert all(re.fullmatch(r"[\w.+:~-]+", version) for version in packages.values()), packages
