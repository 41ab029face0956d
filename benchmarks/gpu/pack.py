"""Packs a token store into one file, which travels to a machine without a network, and unpacks it there.

    python -m benchmarks.gpu.pack data/worth build/worth.zip     packs a store
    python -m benchmarks.gpu.pack build/worth.zip data/worth     unpacks a file (worth.sh does)

Both need `pyppmd`, a wheel of 144 kB. PPMd predicts each byte from the 12 before it. Token ids are written as the characters of a
text, the most frequent ones first: UTF-8 takes one byte for these, so 12 bytes hold more tokens.
"""

import argparse
import sys
import zipfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

ORDER = 12
"""Bytes. With 16, pyppmd 1.3.1 writes files that it cannot read."""
MEMORY = 1 << 30
LIMIT = 0xD7FF
"""Ids below this are characters. UTF-8 has none for the surrogates, which follow."""


def to_text(tokens: npt.NDArray[np.uint16]) -> bytes:
    """The number of distinct ids, the ids from the most to the least frequent, and the tokens as positions in that list."""
    counts = np.bincount(tokens)
    if len(counts) > LIMIT:
        raise ValueError(f"token id {len(counts) - 1}: only ids below {LIMIT} can be packed")
    ids = np.argsort(-counts, kind="stable")
    ranks = np.empty_like(ids)
    ranks[ids] = np.arange(len(ids))
    return np.concatenate([[len(ids)], ids, ranks[tokens]]).astype("<u4").tobytes().decode("utf-32-le").encode()


def from_text(text: bytes) -> npt.NDArray[np.uint16]:
    values = np.frombuffer(text.decode().encode("utf-32-le"), "<u4")
    start = 1 + int(values[0])
    return values[1:start].astype("<u2")[values[start:]]


def pack(store: Path, file: Path) -> None:
    import pyppmd

    with zipfile.ZipFile(file, "w") as out:
        for path in sorted(store.iterdir()):
            data = path.read_bytes()
            if path.suffix == ".tokens":
                data = to_text(np.frombuffer(data, "<u2"))
            packed = pyppmd.compress(data, max_order=ORDER, mem_size=MEMORY)
            if pyppmd.decompress(packed, max_order=ORDER, mem_size=MEMORY) != data:
                raise RuntimeError(f"{path}: pyppmd cannot read what it wrote; change ORDER")
            out.writestr(path.name, packed)


def unpack(file: Path, store: Path) -> None:
    import pyppmd

    store.mkdir(parents=True)
    with zipfile.ZipFile(file) as packed:
        for name in packed.namelist():
            data = pyppmd.decompress(packed.read(name), max_order=ORDER, mem_size=MEMORY)
            (store / name).write_bytes(from_text(data).tobytes() if name.endswith(".tokens") else data)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a token store, or a file to unpack")
    parser.add_argument("target", type=Path)
    args = parser.parse_args()
    (pack if args.source.is_dir() else unpack)(args.source, args.target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
