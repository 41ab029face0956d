"""Implementation of `boost checkpoint`: lists checkpoints and their status, verifies every byte."""

import datetime
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from boost.errors import BoostError, CheckpointError
from boost.train.checkpoint.folders import MANIFEST_FILE, STATE_FILE, TENSORS, step_of
from boost.train.checkpoint.manifest import Manifest, check_size, new_digest, read_manifest
from boost.train.checkpoint.state import Checkpoint, open_checkpoint
from boost.train.checkpoint.structure import read_structure

CHUNK_BYTES = 1_000_000

Status = Literal["complete", "superseded", "incomplete", "damaged"]


@dataclass(frozen=True)
class CheckpointInfo:
    """One checkpoint folder."""

    path: Path
    step: int | None
    status: Status
    """incomplete: no manifest; superseded: abandoned by a rollback or a later `--resume PATH`."""
    bytes: int
    saved: datetime.datetime
    problem: str | None = None
    """What is damaged, or that it was saved in trouble."""


def checkpoint_folders(path: Path) -> list[Path]:
    """Every checkpoint folder at a path (a run directory, a checkpoints folder, or one checkpoint), whatever its status, oldest
    first. Raises CheckpointError if there is none."""
    if (path / STATE_FILE).is_file() or (path / MANIFEST_FILE).is_file() or (path / TENSORS).is_dir():
        return [path]
    for folder in (path / "checkpoints", path):
        if folder.is_dir():
            found = [each for each in folder.iterdir() if each.is_dir() and step_of(each) is not None]
            if found:
                return sorted(found, key=lambda each: (step_of(each) or 0, each.name))
    what = "no checkpoint in" if path.exists() else "no such folder:"
    raise CheckpointError(f"{what} '{path}'; pass a run directory or a step-... folder")


def inspect(path: Path) -> CheckpointInfo:
    """Inspects a checkpoint folder: manifest, file sizes, state and headers. Does not compute digests."""
    files = [each for each in path.rglob("*") if each.is_file()]
    newest = max((each.stat().st_mtime for each in files), default=path.stat().st_mtime)
    total = sum(each.stat().st_size for each in files)
    status, problem = _status(path)
    saved = datetime.datetime.fromtimestamp(newest, datetime.UTC).astimezone()
    return CheckpointInfo(path, step_of(path), status, total, saved, problem)


def _status(path: Path) -> tuple[Status, str | None]:
    if not (path / MANIFEST_FILE).is_file():
        return "incomplete", f"no {MANIFEST_FILE}"
    try:
        checkpoint, _ = _open(path)
    except BoostError as error:
        return "damaged", str(error)
    position = checkpoint.position
    notes = [f"unusable: {position.trouble}"] if position.trouble else []
    notes += [f"unproven: {position.doubt}"] if position.doubt else []
    return ("superseded" if path.name.startswith("superseded-") else "complete"), "; ".join(notes) or None


def _open(path: Path) -> tuple[Checkpoint, Manifest]:
    """Opens a checkpoint and checks everything except digests. Raises CheckpointError."""
    checkpoint, manifest = open_checkpoint(path), read_manifest(path)
    for name in manifest.root:
        check_size(path, name, manifest)
    read_structure(path, manifest, checkpoint.config.model)
    return checkpoint, manifest


class ByteCheck:
    """Compares every byte of a checkpoint with its manifest. A sized iterable over chunks, for a progress bar.

    The constructor raises CheckpointError if anything other than a digest is wrong. After the iteration, `problems` holds one line
    per changed file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = _open(path)[1]
        self.problems: list[str] = []

    def __len__(self) -> int:
        return sum(-(-entry.bytes // CHUNK_BYTES) for entry in self.manifest.root.values())

    def __iter__(self) -> Iterator[int]:
        for name, entry in sorted(self.manifest.root.items()):
            digest = new_digest()
            try:
                with (self.path / name).open("rb") as stream:
                    while chunk := stream.read(CHUNK_BYTES):
                        digest.update(chunk)
                        yield len(chunk)
            except OSError as error:
                self.problems.append(f"'{self.path}' is damaged: {name} cannot be read: {error.strerror}")
            else:
                if digest.hexdigest() != entry.blake2b:
                    self.problems.append(f"'{self.path}' is damaged: {name} has changed")
