"""Reads sources for the tests of readers: the accepted text and the report."""

import bz2
import gzip
import lzma
from itertools import pairwise

from boost.data.report import PrepareReport


def read(*sources):
    """The (key, text) of all documents, and the report."""
    report = PrepareReport()
    documents = [(doc.key, doc.text) for source in sources for doc in source.documents(report)]
    return documents, report


def _examples(report, what):
    return {
        (entry.name, reason): skip.examples
        for source in report.sources
        for entry in source.files
        for reason, skip in getattr(entry, what).items()
    }


def skips(report):
    """Examples of skipped input, by file and reason."""
    return _examples(report, "skipped")


def notes(report):
    """Examples of converted input, by file and conversion."""
    return _examples(report, "notes")


def write_texts(folder, texts):
    """A new folder with a text file for each text."""
    folder.mkdir()
    for i, text in enumerate(texts):
        (folder / f"{i:02}.txt").write_text(text, "utf-8")
    return folder


def content(store):
    """The bytes of a store's files, by name."""
    return {path.name: path.read_bytes() for path in sorted(store.iterdir())}


def texts_of(store, split):
    """The texts of a store's documents."""
    held, ends = store.split(split), store.split(split).documents
    return [store.tokenizer().decode(held.window(int(a), int(b - a - 1)).tolist()) for a, b in pairwise(ends)]


def flip(file, bit=-8):
    """Inverts one bit of a file, by default one of its last byte."""
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


def compressed(path, data):
    """Writes data with the compression of the path's suffix."""
    import pyarrow

    if path.suffix == ".zst":
        with pyarrow.CompressedOutputStream(str(path), "zstd") as out:
            out.write(data)
    else:
        pack = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}.get(path.suffix, bytes)
        path.write_bytes(pack(data))
    return path
