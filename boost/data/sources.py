"""Inputs of `boost prepare`: files and folders, the standard library, a Hugging Face dataset.

A source lists its files when it is created, so a missing file is found before any work is done. It can be read more than once:
`documents(report)` yields its documents in a fixed order and records what it read and skipped in the report. `fingerprint()`
identifies a source without reading it, as JSON values (for files: names, sizes and modification times). `size` is its size on disk
in bytes, or None for a stream.
"""

import os
import re
import stat
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType

from boost.data.hub import HubSource, quiet_hub
from boost.data.options import PrepareOptions, Progress
from boost.data.readers import JSON_SUFFIXES, Document, Unreadable, read_json, read_text, require, with_compression
from boost.data.report import FileReport, PrepareReport
from boost.data.store import STORE_FILE
from boost.data.tables import TABLE_SUFFIXES, read_table
from boost.data.writer import is_leftover
from boost.errors import DataError
from boost.text import JsonObject

# `datasets` writes these files in save_to_disk: the first to the folder of all splits, the others to the folder of each split.
DATASET_DICT = "dataset_dict.json"
DATASET_METADATA = {"dataset_info.json", "state.json"}
CARD = "README.md"
_CONFIGS = re.compile(rb"---\s*\n(?:.*\n)*?configs:")
"""Matches a dataset card whose metadata assign files to splits."""
_CARD_FIELDS = {
    "config_name", "data_dir", "data_files", "default", "description", "drop_labels", "drop_metadata", "features", "version",
    "batch_size", "chunksize", "columns", "encoding", "field",
}  # fmt: skip
"""Fields of a config that choose files, or that cannot matter here: a reader finds out how a file is written."""
CSV_SUFFIXES = with_compression(".csv", ".tsv")
DATA_SUFFIXES = (*JSON_SUFFIXES, *TABLE_SUFFIXES, ".txt")
# Formats whose loaders can run code. A text pickle (protocol 0) is valid ASCII, so it is rejected by name.
REFUSED_SUFFIXES = (".pkl", ".pickle", ".p", ".joblib", ".dill", ".npy", ".npz", ".pt", ".pth", ".ckpt", ".bin", ".idx")
_MAY_NAME_A_SPLIT = re.compile(
    r"(?:^|[-._ 0-9/])(?:train(?:ing)?|valid(?:ation)?|dev|val|test(?:ing)?|eval(?:uation)?)[-._ 0-9/]|^data/.+-\d{5}-of-\d{5}"
)
"""Matches the path of every file that `datasets` may assign to a split because of its name."""
STDLIB_SKIPPED = {"site-packages", "dist-packages", "lib-dynload", "_bundled", "__pycache__"}
STDLIB_SKIPPED |= {"test", "tests", "idlelib", "idle_test"}
"""Folders to skip: third-party packages are not part of the standard library; tests and bundled tools would be half of the text."""


@dataclass(frozen=True)
class InputFile:
    """A file to read. `explicit` files were named by the user, so an unreadable one is an error."""

    path: Path
    key: str
    explicit: bool
    size: int = 0
    mtime_ns: int = 0
    refused: str = ""


AGAIN = "nothing was written; run the command again when nothing else is writing to the input"


def require_unchanged(file: InputFile) -> None:
    """Raises `DataError` if a file has changed since it was listed: a store must not mix two versions of it."""
    try:
        about = file.path.stat()
    except OSError as error:
        raise DataError(f"{file.path} disappeared during preparation ({error.strerror}); {AGAIN}") from None
    if (about.st_size, about.st_mtime_ns) != (file.size, file.mtime_ns):
        raise DataError(f"{file.path} changed during preparation; {AGAIN}")


@contextmanager
def opening_dataset(folder: Path) -> Iterator[ModuleType]:
    """The module `datasets`, quiet, without network and code. Its errors become one line. Raises `DataError`."""
    datasets = require("datasets", f"the dataset in {folder}")
    bars, level = datasets.utils.logging.is_progress_bar_enabled(), datasets.utils.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)
    try:
        with quiet_hub():
            yield datasets
    except DataError:
        raise
    except Exception as error:
        # Missing files, Arrow errors, malformed JSON and YAML.
        line = (str(error).strip().splitlines() or ["no message"])[0]
        raise DataError(f"{folder}: not a dataset that 'datasets' can load: {type(error).__name__}: {line}") from error
    finally:
        datasets.utils.logging.set_verbosity(level)
        if bars:
            datasets.enable_progress_bars()


def read_file(
    path: Path, key: str, text_field: str | None, entry: FileReport, report: PrepareReport
) -> Iterator[Document]:
    """Reads the documents in one file, whose suffix selects the reader. Counts bytes in `report.consumed`. Raises `Unreadable`."""
    name = path.name.lower()
    if name.endswith(TABLE_SUFFIXES):
        yield from read_table(path, key, text_field, entry, report)
    elif name.endswith(JSON_SUFFIXES):
        yield from read_json(path, key, text_field, entry, report)
    elif name.endswith(CSV_SUFFIXES):
        fix = 'save it as Parquet: python -c \'import pandas; pandas.read_csv("a.csv").to_parquet("a.parquet")\''
        raise Unreadable("a CSV file, which would be read as text with its delimiters", fix=fix)
    elif name.endswith(REFUSED_SUFFIXES):
        raise Unreadable("refused: pickles and binary arrays are never loaded", fix="export the text as .txt or .jsonl")
    else:
        yield from read_text(path, key, entry, report)


class FilesSource:
    """One path on the command line: a file, or a folder that is walked in sorted order.

    Hidden files and folders are skipped and reported. Symbolic links to folders are not followed, and a file that
    can be reached twice is read once. Keys are paths relative to the folder, so moving a corpus does not change its split.
    """

    def __init__(self, path: str | Path, text_field: str | None = None, seen: set[str] | None = None) -> None:
        """`seen`: real paths (absolute) and document keys (relative) of earlier inputs on the same command line. Raises `DataError`
        if there is nothing at the path."""
        self.path, self.name, self.text_field = Path(path), str(path), text_field
        self._skipped: list[tuple[str, str]] = []
        self._chosen = set[Path]()
        """Files of a train split that is known to be one."""
        self._saved_files = set[Path]()
        """Files of saved datasets."""
        self._seen = set[str]() if seen is None else seen
        if not self.path.exists():
            raise DataError(
                f"{path}: no such file or folder; check the spelling, or use --stdlib for a corpus without files"
            )
        if self.path.is_dir():
            self.files = [self._input(file, explicit=False) for file in self._data(self._of_train([*self._walk()]))]
        else:
            self.files = [self._input(self.path, explicit=True)]
        self.size: int | None = sum(file.size for file in self.files)

    def _walk(self) -> Iterator[Path]:
        def unreadable(error: OSError) -> None:
            raise DataError(f"{error.filename}: {error.strerror}; make the folder readable or leave it out")

        for folder, folders, names in os.walk(self.path, onerror=unreadable):
            if {STORE_FILE, "train.tokens"} <= set(names):
                # Otherwise a store inside its own input would become input to the next run.
                self._skip(folder, "a token store")
                folders.clear()
                continue
            if DATASET_DICT in names or set(names) >= DATASET_METADATA:
                try:
                    files = self._saved(Path(folder))
                    self._saved_files.update(files)
                    yield from files
                except DataError as problem:
                    if Path(folder) == self.path:
                        raise
                    self._skip(folder, str(problem))
                folders.clear()
                continue
            for name in sorted((*folders, *names)):
                if name.startswith("."):
                    self._skip(os.path.join(folder, name), "hidden")
            folders[:] = sorted(name for name in folders if not name.startswith(".") and not is_leftover(name))
            yield from (
                Path(folder, name) for name in sorted(names) if not name.startswith(".") and not is_leftover(name)
            )

    def _saved(self, folder: Path) -> list[Path]:
        """The Arrow files of a dataset that `save_to_disk` wrote, or of its train split. Other files are skipped: shards of an
        earlier save, caches, metadata."""
        with opening_dataset(folder) as datasets:
            saved = datasets.load_from_disk(str(folder), keep_in_memory=False)
            if isinstance(saved, datasets.DatasetDict):
                if "train" not in saved:
                    names = ", ".join(sorted(saved)) or "none"
                    raise DataError(
                        f"{folder}: this saved dataset has no train split; pass the folder of one of its splits: {names}"
                    )
                for name in sorted({path.name for path in folder.iterdir() if path.is_dir()} - {"train"}):
                    self._skip(folder / name, "not the train split; to read it, pass its folder")
                self._skip(folder / DATASET_DICT, "metadata of a saved dataset")
                folder, saved = folder / "train", saved["train"]
                self._chosen.update(folder.iterdir())
            files = [folder / Path(file["filename"]).name for file in saved.cache_files]
        for path in sorted({*folder.rglob("*")} - {*files}):
            is_metadata = path.name in DATASET_METADATA
            self._skip(path, "metadata of a saved dataset" if is_metadata else "not part of the saved dataset")
        return files

    def _of_train(self, paths: list[Path]) -> list[Path]:
        """The files to read: those of the train split, if `datasets` finds splits in the folder, by the names of files and folders
        or in the dataset card. If it finds no train split, files in none of its splits; else, all files of its only split. Files
        in formats that it does not read are not left out."""
        data = {path: path.relative_to(self.path).as_posix() for path in paths if path not in self._chosen}
        data = {path: name for path, name in data.items() if name.lower().endswith(DATA_SUFFIXES)}
        card, hidden = self.path / CARD, self.path / ".huggingface.yaml"
        configs = {file: file.read_bytes() for file in (card, hidden) if file.is_file()}
        front = configs.get(card, b"").partition(b"\n---")[0]
        has_configs = bool(_CONFIGS.match(front)) or hidden in configs
        if not has_configs and not any(map(_MAY_NAME_A_SPLIT.search, data.values())):
            return paths
        with opening_dataset(self.path) as datasets, TemporaryDirectory() as folder:
            import yaml  # a requirement of `datasets`

            texts = (front.removeprefix(b"---"), configs.get(hidden, b"")) if has_configs else ()
            listed = [config for text in texts for config in (yaml.safe_load(text) or {}).get("configs") or ()]
            if "://" in str(listed):
                raise DataError(
                    f"{self.path}: the configs of its dataset card name data on the network; download it, or remove them"
                )
            # Names alone decide, so `datasets` gets empty files, all of one format: else, it would leave out the others.
            root, suffix = Path(os.path.realpath(folder), "data"), "" if has_configs else ".txt"
            mirror = {f"{name}{suffix}": b"" for name in data.values()} | {k.name: v for k, v in configs.items()}
            for name, content in mirror.items():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_bytes(content)
            chosen = datasets.load_dataset_builder(str(root), cache_dir=folder).config
            found = chosen.data_files or {}
            wanted = {key for c in listed if c.get("config_name", "default") == chosen.name for key in c} - _CARD_FIELDS
            if wanted:
                raise DataError(
                    f"{self.path}: its dataset card sets {', '.join(sorted(wanted))} for the files, which is not supported; save "
                    "the dataset as Parquet (load_dataset, then to_parquet), or remove these fields from the card to read the "
                    "files as they are"
                )
        splits = {
            str(split): {os.path.relpath(file, root).removesuffix(suffix) for file in files}
            for split, files in found.items()
        }
        others = {file: name for name, files in splits.items() for file in files if name != "train"}
        train = splits.get("train", set() if has_configs else {*data.values()} - {*others})
        if not train and len(splits) == 1:
            train, others = {*others}, {}
        if not train:
            raise DataError(f"{self.path}: no train split among {', '.join(splits)}; pass the files of one of them")
        if not others and not has_configs and all(".txt" in file for file in train):
            return paths  # texts, one of which happens to be named so
        read = []
        for path in paths:
            key = path.relative_to(self.path).as_posix()
            if key in train or not (key in others or path in data or path == card):
                read.append(path)
            else:
                self._skip(path, f"in the split {others[key]!r}, not in train" if key in others else "in no split")
        return read

    def _data(self, paths: list[Path]) -> Iterator[Path]:
        """The files without those that a dataset has next to or above its tables, such as a license."""
        tables = {path for path in paths if path.name.lower().endswith(TABLE_SUFFIXES)}
        folders = {folder for table in tables - self._saved_files for folder in table.parents}
        for path in paths:
            if path in tables or path.parent not in folders:
                yield path
            else:
                self._skip(path, "not a table, but in a folder of tables; to read it, pass it by name")

    def _skip(self, path: str | Path, reason: str) -> None:
        self._skipped.append((os.path.relpath(path, self.path), reason))

    def _input(self, path: Path, explicit: bool) -> InputFile:
        key = path.name if explicit else path.relative_to(self.path).as_posix()
        try:
            about = path.stat()
        except OSError as error:
            return InputFile(path, key, explicit, refused=f"cannot be opened: {error.strerror}")
        if not stat.S_ISREG(about.st_mode):
            return InputFile(path, key, explicit, refused="not a regular file")
        real = os.path.realpath(path)
        if real in self._seen:
            return InputFile(path, key, False, refused="already read under another name")
        self._seen.add(real)
        # Documents with the same key would share a split.
        number, name = 2, key
        while key in self._seen:
            number, key = number + 1, f"{name}#{number}"
        self._seen.add(key)
        return InputFile(path, key, explicit, about.st_size, about.st_mtime_ns)

    def documents(self, report: PrepareReport) -> Iterator[Document]:
        section = report.source(self.name)
        for name, reason in self._skipped:
            section.file(name).skip(reason)
        for file in self.files:
            entry = section.file(file.key)
            try:
                if file.refused:
                    raise Unreadable(file.refused)
                require_unchanged(file)
                if file.size == 0:
                    entry.skip("empty")
                    continue
                try:
                    yield from read_file(file.path, file.key, self.text_field, entry, report)
                except OSError as error:
                    raise Unreadable(f"cannot be read: {error.strerror or error}") from error
                require_unchanged(file)
            except Unreadable as problem:
                if file.explicit:
                    raise DataError(f"{file.path}: {problem}") from problem
                documents = 1
                with suppress(Exception):  # damage
                    documents = max(problem.documents(), 1)
                entry.skip(problem.reason, problem.where, documents)

    def fingerprint(self) -> list[object]:
        return [[file.key, file.size, file.mtime_ns] for file in self.files]


class StdlibSource(FilesSource):
    """The Python files of the running interpreter's standard library: a corpus that needs no download."""

    def __init__(self, root: str | Path | None = None) -> None:
        super().__init__(root or sysconfig.get_paths()["stdlib"])
        self.name = "Python standard library"

    def _walk(self) -> Iterator[Path]:
        paths: list[Path] = []
        for folder, folders, names in os.walk(self.path):
            folders[:] = [
                name for name in folders if name not in STDLIB_SKIPPED and not name.startswith((".", "config-"))
            ]
            paths += (path for path in (Path(folder, name) for name in names if name.endswith(".py")) if path.is_file())
        return iter(sorted(paths, key=Path.as_posix))


Source = FilesSource | HubSource
"""One input; the standard library is a `FilesSource`."""


def open_sources(options: PrepareOptions) -> tuple[list[Source], list[Source]]:
    """Returns the sources of text and of the held-out split (none if it is a fraction of the documents). Raises `DataError`."""
    seen = set[str]()
    hub_splits = [
        split for split in (options.hf_split, options.heldout_split) if options.hf is not None and split is not None
    ]
    of_heldout, of_train = (
        [FilesSource(path, options.text_field, seen) for path in paths]
        for paths in (options.heldout_from, options.inputs)
    )
    of_hub = [
        HubSource(str(options.hf), split, options.text_field or "text", options.hf_revision) for split in hub_splits
    ]
    sources: list[Source] = [*([StdlibSource()] if options.stdlib else []), *of_train, *of_hub[:1]]
    if not sources:
        raise DataError(
            "no input given; pass text, JSON, Parquet or Arrow files, --hf NAME, or --stdlib for a corpus without files"
        )
    return sources, [*of_heldout, *of_hub[1:]]


# Reading all sources any number of times, and continuing where an interrupted run stopped. A position is a list of marks, one per
# source that has been started. A stream continues at its own position. Files must have unchanged sizes and times; they are reread
# from the start of their source up to the mark, which is fast compared with tokenizing.


@dataclass
class _Begun:
    """A source that this pass has begun to read."""

    source: Source
    section: int
    """Its entry in the report."""
    documents: int = 0
    """Number of its documents so far."""


class Reading:
    """The documents from all sources: those for the held-out split first, then at most `limit` documents from the other sources."""

    def __init__(
        self, sources: Sequence[Source], heldout: Sequence[Source], limit: int | None, progress: Progress
    ) -> None:
        sizes = [source.size for source in (*heldout, *sources)]
        self._total = None if None in sizes else sum(size for size in sizes if size is not None)
        self._sources, self._heldout, self._limit, self._progress = sources, heldout, limit, progress
        self.separate = bool(heldout)
        """Whether held-out documents come from separate sources."""
        self.report = PrepareReport()
        self.taken = 0
        """Number of documents in this pass, excluding those from sources for the held-out split."""
        self._begun: list[_Begun] = []

    def documents(
        self, phase: str, is_full: Callable[[str], bool] = lambda split: False, saved: Sequence[JsonObject] = ()
    ) -> Iterator[Document]:
        """Makes one pass, with a new report. `is_full(split)`: whether the split needs no more documents. `saved`: the `position`
        to continue from."""
        self.report = PrepareReport()
        self._progress.phase(phase, self._total)
        self.taken, self._begun = 0, []
        left = list(saved)

        def is_over(split: str) -> bool:
            return is_full(split) or (split == "train" and self.taken == self._limit)

        for split, sources in (("heldout", self._heldout), ("train", self._sources)):
            for source in sources:
                mark = left.pop(0) if left else None
                if mark is None and is_over(split):
                    break
                for document in self._read(source, split, mark, bool(left), is_over):
                    yield document
                    self._progress.update(self.report.consumed, self.taken)
                    if is_over(split):
                        break

    def _read(
        self, source: Source, split: str, mark: JsonObject | None, finished: bool, is_over: Callable[[str], bool]
    ) -> Iterator[Document]:
        """The documents from one source after its mark; none if the mark is at its end (`finished`)."""
        self._begun.append(begun := _Begun(source, len(self.report.sources)))
        again = 0 if mark is None else int(mark["documents"])
        documents: Iterator[Document]
        if mark is None or not isinstance(source, HubSource):
            documents = source.documents(self.report)
        else:
            begun.documents = again
            self.taken += again if split == "train" else 0
            if finished or is_over(split):
                self.report.source(source.name).restore(mark["entries"])
                return
            documents, again = source.documents(self.report, mark["stream"], mark["entries"]), 0
        for document in documents:
            begun.documents += 1
            self.taken += split == "train"
            if begun.documents > again:
                yield replace(document, split=split) if self.separate else document
                continue
            self._progress.update(self.report.consumed, self.taken)
            if mark is not None and begun.documents == again:
                self.report.sources[begun.section].restore(mark["entries"])
                if finished or is_over(split):
                    return
        if begun.documents < again:
            raise DataError(f"{source.name} has fewer documents than before the interruption; {AGAIN}")

    def position(self) -> list[JsonObject]:
        """The position of this pass, as JSON values. Includes token counts, so all documents so far must have been written."""
        return [
            {
                "documents": begun.documents,
                "entries": [
                    asdict(entry) for section in self.report.sources[begun.section :][:1] for entry in section.files
                ],
                "stream": begun.source.position()
                if begun is self._begun[-1] and isinstance(begun.source, HubSource)
                else None,
            }
            for begun in self._begun
        ]

    def update_progress(self, left: int) -> None:
        """Shows progress within a long document with about `left` bytes remaining."""
        self._progress.update(max(self.report.consumed - left, 0), self.taken)
