"""Implementation of `boost checkpoint`: lists checkpoints and their status, verifies every byte, rebuilds a lost manifest."""

import datetime
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from boost.errors import BoostError, CheckpointError, DamagedCheckpointError
from boost.train.checkpoint.folders import MANIFEST_FILE, STATE_FILE, TENSORS, step_of
from boost.train.checkpoint.manifest import FileEntry, Manifest, check_size, entry_of, new_digest, read_manifest, sync
from boost.train.checkpoint.state import Checkpoint, open_checkpoint, read_state
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
    """What is damaged; that it was saved in trouble; for a rebuilt manifest, that its digests are not those of the save."""


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
        checkpoint, manifest = _open(path)
    except BoostError as error:
        return "damaged", str(error)
    position = checkpoint.position
    notes = [f"unusable: {position.trouble}"] if position.trouble else []
    notes += [f"unproven: {position.doubt}"] if position.doubt else []
    notes += [f"digests are from the repair at {manifest.repaired}"] if manifest.repaired else []
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


def require_repairable(path: Path) -> Checkpoint:
    """Raises CheckpointError unless a missing or unreadable manifest is the only problem of a checkpoint."""
    if not (path / STATE_FILE).is_file() or not (path / TENSORS).is_dir():
        raise CheckpointError(
            f"'{path}' has no {STATE_FILE} and {TENSORS}; name the step-... folder whose manifest is lost"
        )
    if (path / MANIFEST_FILE).is_file():
        try:
            manifest = read_manifest(path)
        except DamagedCheckpointError:
            pass  # unreadable is the same as missing
        else:
            for name in sorted(manifest.root):
                check_size(path, name, manifest)
                if entry_of(path / name).blake2b != manifest.root[name].blake2b:
                    raise CheckpointError(
                        f"'{path}' has a manifest, and {name} has changed since it was saved: new digests would only hide the "
                        "damage; use another checkpoint"
                    )
            raise CheckpointError(f"'{path}' has an intact manifest; nothing to repair")
    checkpoint = read_state(path)
    names = {name: FileEntry(bytes=0, blake2b="0" * 40) for name in _own_files(path)}
    read_structure(path, Manifest(names), checkpoint.config.model)
    return checkpoint


def rebuild_manifest(path: Path) -> Manifest:
    """Writes a manifest of the current files, marked as repaired. Raises CheckpointError like `require_repairable`."""
    require_repairable(path)
    today = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    entries = {name: entry_of(path / name).model_copy(update={"repaired": today}) for name in _own_files(path)}
    manifest = Manifest(entries)
    temporary = path / f".{MANIFEST_FILE}.tmp"
    temporary.unlink(missing_ok=True)
    manifest.write(path, temporary.name)
    os.replace(temporary, path / MANIFEST_FILE)
    sync(path)
    return manifest


def _own_files(path: Path) -> list[str]:
    """Files written by a save, without hidden files."""
    tensors = [each for each in sorted((path / TENSORS).glob("*.safetensors")) if not each.name.startswith(".")]
    texts = [each for each in sorted(path.glob("*.json")) if each.name != MANIFEST_FILE]
    return [each.relative_to(path).as_posix() for each in (*texts, *tensors)]
