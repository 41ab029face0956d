"""Files of token ids, written by hand from the specifications of their formats."""

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

MEGATRON_CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}
LLM_C = {"<u2": (20240520, 1), "<u4": (20240801, 7)}


def write_megatron(prefix: Path, documents: Sequence[Sequence[Sequence[int]]], dtype: str = "uint16") -> Path:
    """PREFIX.bin and PREFIX.idx of documents that consist of sequences of ids; returns the path of the index."""
    sequences = [sequence for document in documents for sequence in document]
    item = np.dtype(dtype).itemsize
    offsets, boundaries = [0], [0]
    for sequence in sequences:
        offsets.append(offsets[-1] + len(sequence) * item)
    for document in documents:
        boundaries.append(boundaries[-1] + len(document))
    index = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", MEGATRON_CODES[dtype])
    index += struct.pack("<QQ", len(sequences), len(boundaries))
    index += struct.pack(f"<{len(sequences)}i", *map(len, sequences))
    index += struct.pack(f"<{len(sequences)}q", *offsets[:-1])
    index += struct.pack(f"<{len(boundaries)}q", *boundaries)
    letter = np.dtype(dtype).char
    data = b"".join(struct.pack(f"<{len(s)}{letter if item < 8 else 'q'}", *s) for s in sequences)
    prefix.with_name(f"{prefix.name}.bin").write_bytes(data)
    path = prefix.with_name(f"{prefix.name}.idx")
    path.write_bytes(index)
    return path


def write_llm_c(path: Path, ids: Sequence[int], dtype: str) -> None:
    """A .bin file with llm.c's header of 256 int32."""
    header = struct.pack("<256i", *LLM_C[dtype], len(ids), *[0] * 253)
    path.write_bytes(header + np.array(ids, dtype).tobytes())
