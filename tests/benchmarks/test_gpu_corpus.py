"""benchmarks/gpu/corpus.py: what becomes text, without packages."""

import gzip
import re
import tomllib
from pathlib import Path

from benchmarks.gpu.corpus import LIST, documents, is_prose, paragraphs, prose

SENTENCE = "The size of the buffer is the number of bytes that are read in one call, and it is set to zero for a file."


def test_markup_is_removed() -> None:
    page = "<head><title>x</title></head><p>Tom &amp; the <b>bold</b>\nones</p><script>var a = 1;</script><p>Next</p>"
    assert prose("a.html", page).split("\n\n")[-1].strip() == "" and "var a" not in prose("a.html", page)
    assert " ".join(prose("a.html", page).split()) == "Tom & the bold ones Next"
    assert " ".join(prose("ls.1.gz", '.SH NAME\n.B ls\nlist \\fIdirectory\\fR\\-contents\n.\\" comment\n').split()) == (
        "ls list directory-contents"
    )
    assert prose("ls.1", r'a \*(L"b\*(R" \f(CWc\fR \s-1POD\s0') == "a b c POD"
    assert prose("a.pod", "call C<f()> or L<< g >>") == "call f() or g"
    assert prose("a.txt", "<p>") == "<p>"


def test_a_dictionary_has_one_paragraph_per_entry() -> None:
    entries = (
        'Basset \\Bas"set\\, n.\n   A hound.\n   [1913 Webster]\nBasseting, n.\n   The upward direction of a vein.\n'
    )
    assert list(paragraphs(prose("gcide.dict.dz", entries))) == ["Basseting, n. The upward direction of a vein."]
    assert prose("gcide.dict.dz", entries).split("\n\n")[0].split() == ["Basset", '\\Bas"set\\,', "n.", "A", "hound."]


def test_prose_is_english() -> None:
    assert is_prose(SENTENCE) and is_prose(f'"{SENTENCE}"')
    for other in (
        SENTENCE.rstrip("."),
        "The size of the buffer and the number of bytes",
        "# The size of the buffer is set to zero for a file: buffer[0] = read(fd, &p->size, sizeof(*p)); return (p);",
        "Der Puffer hat eine feste Anzahl von Bytes, und er wird mit jedem Aufruf neu gelesen und geschrieben.",
    ):
        assert not is_prose(other)


def test_what_was_seen_is_dropped(tmp_path: Path) -> None:
    lines, others = ([f"In {place}: {SENTENCE}" for place in places] for places in ("abcdef", "ghijkl"))
    (tmp_path / "a.txt").write_text("\n\n".join(lines))
    again = [f"**{line.upper()}**" for line in lines]  # other markup
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress("\n\n".join([*again, *others]).encode()))
    (tmp_path / "_sources").mkdir()
    (tmp_path / "_sources" / "b.rst.txt").write_text(SENTENCE * 9)
    (tmp_path / "c.bin").write_text(SENTENCE * 9)
    (tmp_path / "changelog.gz").write_bytes(gzip.compress((SENTENCE * 9).encode()))
    first, second = documents(tmp_path, set())
    assert list(paragraphs(first)) == lines and list(paragraphs(second)) == others


def test_every_package_has_a_version() -> None:
    packages = tomllib.loads(LIST.read_text(encoding="utf-8"))["packages"]
    assert len(packages) > 20
    assert all(re.fullmatch(r"[\w.+:~-]+", version) for version in packages.values()), packages
