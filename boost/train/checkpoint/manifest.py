"""The manifest of a checkpoint: size and digest of every file. Files that it does not list are never opened."""

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, RootModel, ValidationError, field_validator

from boost.errors import DamagedCheckpointError
from boost.paths import file_name
from boost.train.checkpoint.folders import MANIFEST_FILE, STATE_FILE, TENSORS


def new_digest() -> hashlib.blake2b:
    """The hash function of manifests: BLAKE2b with 20 bytes."""
    return hashlib.blake2b(digest_size=20)


class FileEntry(BaseModel):
    """Manifest entry of one file."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    bytes: Annotated[int, Field(ge=0)]
    blake2b: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]


class Manifest(RootModel[dict[str, FileEntry]]):
    """Entries by path, relative to the checkpoint, with forward slashes."""

    @field_validator("root")
    @classmethod
    def _lists_state(cls, root: dict[str, FileEntry]) -> dict[str, FileEntry]:
        if STATE_FILE not in root:
            raise ValueError(f"{STATE_FILE} is not in its manifest")
        return root

    @property
    def tensor_files(self) -> list[str]:
        """Relative paths of the safetensors files."""
        return sorted(n for n in self.root if n.startswith(f"{TENSORS}/") and n.endswith(".safetensors"))

    def strays(self, path: Path) -> list[str]:
        """Files of a checkpoint that the manifest does not list; they are never opened."""
        present = {each.relative_to(path).as_posix() for each in path.rglob("*") if each.is_file()}
        return sorted(present - self.root.keys() - {MANIFEST_FILE})

    def write(self, folder: Path, name: str = MANIFEST_FILE) -> None:
        """Writes the manifest to `name` in `folder` and syncs it to disk."""
        text = json.dumps(self.model_dump(exclude_none=True), indent=2, sort_keys=True)
        write_synced(folder / name, text.encode())


def read_manifest(path: Path) -> Manifest:
    """Reads the manifest of a checkpoint. Raises DamagedCheckpointError."""
    try:
        manifest = Manifest.model_validate(read_json(path / MANIFEST_FILE))
    except ValidationError as error:
        raise DamagedCheckpointError(f"'{path}' is damaged: {MANIFEST_FILE}: {first_problem(error)}") from None
    for name in manifest.root:
        file_name(name, path / MANIFEST_FILE, "a file", DamagedCheckpointError, nested=True)
    return manifest


def verify_file(path: Path, name: str, manifest: Manifest) -> None:
    """Compares every byte of a file with the manifest. Raises DamagedCheckpointError."""
    check_size(path, name, manifest)
    try:
        digest = file_digest(path / name)
    except OSError as error:
        raise DamagedCheckpointError(f"'{path}' is damaged: {name} cannot be read: {error.strerror}") from None
    if digest != manifest.root[name].blake2b:
        raise DamagedCheckpointError(f"'{path}' is damaged: {name} has changed")


def check_size(path: Path, name: str, manifest: Manifest) -> None:
    """Compares the size of a file with the manifest. Raises DamagedCheckpointError."""
    file, expected = path / name, manifest.root[name]
    if not file.is_file():
        raise DamagedCheckpointError(f"'{path}' is damaged: {name} is missing")
    if (found := file.stat().st_size) != expected.bytes:
        raise DamagedCheckpointError(f"'{path}' is damaged: {name} has {found} bytes instead of {expected.bytes}")


def entry_of(file: Path) -> FileEntry:
    """Computes the manifest entry of a file on disk."""
    return FileEntry(bytes=file.stat().st_size, blake2b=file_digest(file))


def entries_of(folder: Path, names: Iterable[str]) -> dict[str, FileEntry]:
    """Syncs files to disk and computes their manifest entries."""
    entries = {}
    for name in names:
        sync(folder / name)
        entries[name] = entry_of(folder / name)
    return entries


def file_digest(file: Path) -> str:
    """Digest of a file on disk."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, new_digest).hexdigest()


def write_synced(file: Path, content: bytes) -> FileEntry:
    """Writes a new file, syncs it to disk, and returns its manifest entry."""
    with file.open("xb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    digest = new_digest()
    digest.update(content)
    return FileEntry(bytes=len(content), blake2b=digest.hexdigest())


def sync(path: Path) -> None:
    """Syncs a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object. Raises DamagedCheckpointError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DamagedCheckpointError(f"'{path.parent}' is not complete: {path.name} is missing") from None
    except OSError as error:
        raise DamagedCheckpointError(f"'{path}' cannot be read: {error.strerror}") from None
    except RecursionError:
        raise DamagedCheckpointError(f"'{path}' is damaged: nested too deeply") from None
    except ValueError as error:  # not UTF-8, not JSON, or a number with thousands of digits
        raise DamagedCheckpointError(f"'{path}' is damaged: {error}") from None
    if not isinstance(value, dict):
        raise DamagedCheckpointError(f"'{path}' is damaged: it is not a JSON object")
    return value


def first_problem(error: ValidationError) -> str:
    """The first problem of a validation error, in a few words."""
    problem = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(str(part) for part in problem["loc"])
    return f"{where}: {problem['msg']}" if where else str(problem["msg"]).removeprefix("Value error, ")
