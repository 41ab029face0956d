"""The token store, which `boost prepare` writes and training reads.

    STORE/store.json           metadata: format, tokenizer, sizes, input fingerprint, options, report, digests of all files
    STORE/report.json          the report, per file
    STORE/tokenizer.json       the Hugging Face tokenizer
    STORE/train.tokens         little-endian uint16 (vocabulary up to 65536) or uint32, documents concatenated
    STORE/train.documents      little-endian int64, n_documents + 1 offsets into the tokens, from 0 to n_tokens
    STORE/heldout.tokens, STORE/heldout.documents

Every document ends with the end-of-document token. A store gets its final name only when it is complete.
"""

import errno
import json
import shlex
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from boost.data.blocks import DIGEST_BYTES, FileArray, block_digest, unreadable
from boost.data.tokenizer import parse_tokenizer, tokenizer_fingerprint
from boost.errors import DataError
from boost.paths import read_text, require_regular
from boost.text import JsonObject

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FORMAT = 1
SPLITS = ("train", "heldout")
STORE_FILE, REPORT_FILE, TOKENIZER_FILE = "store.json", "report.json", "tokenizer.json"
OFFSET_DTYPE = np.dtype("<i8")
_CHUNK = 1 << 22
_LANDMARK = 1 << 10


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """The dtype on disk for token ids below `vocab_size`."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


@dataclass(frozen=True)
class Split:
    """One split of a store: `tokens` [n_tokens] (uint16 or uint32) and `documents` [n_documents + 1] (int64), read on access.

    `n_bytes` is the UTF-8 length of the source text, without end-of-document tokens.
    """

    name: str
    path: Path
    tokens: "FileArray | npt.NDArray[np.integer]"
    documents: "FileArray | npt.NDArray[np.int64]"
    n_bytes: int
    vocab_size: int
    eos: int
    largest_token: int
    """Largest id that may occur."""

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)

    @property
    def n_documents(self) -> int:
        return len(self.documents) - 1

    @property
    def bytes_per_token(self) -> float:
        """Bytes of text per token."""
        return self.n_bytes / self.n_tokens

    def window(self, start: int, length: int) -> npt.NDArray[np.int64]:
        """Tokens [length] from `start`, converted to int64. Raises IndexError if they are out of range, `DataError` if the
        file was truncated or contains an invalid token id (which on a GPU would only fail a device assertion)."""
        tokens = np.asarray(self.read(start, length), dtype=np.int64)
        if (largest := tokens.max(initial=0)) > self.largest_token:
            what = f"{self.name}.tokens contains token id {largest} near position {start}"
            raise damaged(self.path, f"{what}, above the maximum of {self.largest_token}")
        return tokens

    def read(self, start: int, length: int) -> npt.NDArray[np.integer]:
        """`window` in the dtype on disk, without the check of token ids, which is cheaper for many windows together."""
        self._check(start, length)
        return self.tokens[start : start + length]

    def document_ids(self, start: int, length: int) -> npt.NDArray[np.int32]:
        """Document index of each of `length` positions from `start`, relative to the window's first document; int32 [length]."""
        self._check(start, length)
        first, last = np.searchsorted(self._landmarks, (start, start + length), side="right").tolist()
        ends = np.asarray(self.documents[max(first - 1, 0) * _LANDMARK : last * _LANDMARK])
        begins = ends[np.searchsorted(ends, start, side="right") :] - start
        return np.searchsorted(begins, np.arange(length), side="right").astype(np.int32)

    @cached_property
    def _landmarks(self) -> npt.NDArray[np.int64]:
        """Every 1,024th boundary, so that finding a document takes one read."""
        return np.array([self.documents[n] for n in range(0, len(self.documents), _LANDMARK)], dtype=np.int64)

    def _check(self, start: int, length: int) -> None:
        if start < 0 or length < 0 or start + length > self.n_tokens:
            end = start + length
            raise IndexError(f"positions {start} to {end}: split {self.name!r} has only {self.n_tokens} tokens")

    def token_counts(self) -> npt.NDArray[np.int64]:
        """Frequencies of the tokens, int64 [vocab_size]; reads the whole split in chunks."""
        counts = np.zeros(self.vocab_size, dtype=np.int64)
        for start in range(0, self.n_tokens, _CHUNK):
            counts += np.bincount(self.tokens[start : start + _CHUNK], minlength=self.vocab_size)
        return counts

    def unigram_entropy(self) -> float:
        """Entropy of the token frequencies in nats per token: the loss of the best unigram model."""
        counts = self.token_counts()
        share = counts[counts > 0] / counts.sum()
        return float(-(share * np.log(share)).sum())


class TokenStore:
    """A finished token store, opened read-only with `TokenStore.open`."""

    def __init__(self, path: Path, meta: JsonObject, tokenizer_json: str) -> None:
        """`tokenizer_json`: the text of tokenizer.json when the store was opened, even if the file has changed since."""
        self.path, self.meta, self.tokenizer_json = path, meta, tokenizer_json
        self._splits: dict[str, Split] = {}

    @classmethod
    def open(cls, path: str | Path) -> "TokenStore":
        """Opens and checks a store. Raises `DataError` if it is missing, unfinished, damaged or in another format."""
        path = Path(path)
        meta = read_meta(path)
        try:
            tokenizer_json = read_text(path / TOKENIZER_FILE)
            fingerprint = tokenizer_fingerprint(tokenizer_json)
        except OSError as error:
            raise file_error(path, TOKENIZER_FILE, error) from None
        except (ValueError, RecursionError) as error:
            raise damaged(path, f"{TOKENIZER_FILE} is damaged ({error})") from error
        if fingerprint != meta["tokenizer_fingerprint"]:
            raise damaged(path, f"{TOKENIZER_FILE} is not the tokenizer that produced the tokens")
        store = cls(path, meta, tokenizer_json)
        for name in SPLITS:
            store._check_files(name)
        return store

    def _check_files(self, name: str) -> None:
        sizes = self.meta["splits"][name]
        expected = {
            f"{name}.tokens": sizes["tokens"] * np.dtype(self.meta["dtype"]).itemsize,
            f"{name}.documents": (sizes["documents"] + 1) * OFFSET_DTYPE.itemsize,
        }
        for file, size in expected.items():
            try:
                actual = require_regular(self.path / file).st_size
            except OSError as error:
                raise file_error(self.path, file, error) from None
            if actual != size:
                raise damaged(self.path, f"{file} has {actual} bytes, but {STORE_FILE} expects {size}")
        offsets = self.split(name).documents
        if offsets[0] != 0 or offsets[-1] != sizes["tokens"]:
            raise damaged(self.path, f"{name}.documents does not span the {sizes['tokens']} tokens")

    @property
    def vocab_size(self) -> int:
        """One more than the tokenizer's largest token id."""
        return int(self.meta["vocab_size"])

    @property
    def largest_token(self) -> int:
        """The largest token id that occurs; a model needs more rows than that. Some tokenizers have entries that never occur."""
        return max(int(self.meta["splits"][name]["largest_token"]) for name in SPLITS)

    @property
    def eos(self) -> int:
        """Id of the token that ends every document."""
        return int(self.meta["eos"]["id"])

    @property
    def fingerprint(self) -> str:
        """The tokenizer's fingerprint, which checkpoints record."""
        return str(self.meta["tokenizer_fingerprint"])

    @property
    def blocks(self) -> dict[str, str]:
        """Concatenated block digests by file (`boost.data.blocks`)."""
        return dict(self.meta["blocks"])

    def content(self, split: str) -> str:
        """sha256 (hex) of a split's tokens: the same for the same text and tokenizer, on any machine."""
        return str(self.meta["splits"][split]["sha256"])

    @property
    def report(self) -> JsonObject:
        """What was read and skipped, per source."""
        return dict(self.meta["report"])

    @cached_property
    def _tokenizer(self) -> "Tokenizer":
        return parse_tokenizer(self.tokenizer_json)

    def tokenizer(self) -> "Tokenizer":
        """The tokenizer of this store; see `load_tokenizer` for how it encodes."""
        return self._tokenizer

    def require_tokenizer(self, fingerprint: str, owner: str) -> None:
        """Raises `DataError` unless the store was made with this tokenizer. `owner`: what requires it, for the message."""
        if fingerprint != self.fingerprint:
            raise DataError(
                f"{self.path}: its tokenizer ({self.fingerprint[:12]}) differs from that of {owner} ({fingerprint[:12]}); "
                f"prepare the corpus with that tokenizer: boost prepare INPUT --out OTHER --tokenizer PATH"
            )

    def split(self, name: str) -> Split:
        """The split `train` or `heldout`. Its files are opened once, so that replacing or deleting the store changes nothing."""
        if name in self._splits:
            return self._splits[name]
        sizes = self.meta["splits"][name]
        self._splits[name] = Split(
            name=name,
            path=self.path,
            tokens=FileArray(self.path / f"{name}.tokens", token_dtype(self.vocab_size)),
            documents=FileArray(self.path / f"{name}.documents", OFFSET_DTYPE),
            n_bytes=int(sizes["bytes"]),
            vocab_size=self.vocab_size,
            eos=self.eos,
            largest_token=int(sizes["largest_token"]),
        )
        return self._splits[name]


def is_missing(path: Path) -> bool:
    """Whether `path` holds no store, not even an interrupted one."""
    return not any(path.with_name(path.name + suffix).exists() for suffix in ("", ".boost-old", ".boost-tmp"))


def read_meta(path: Path) -> JsonObject:
    """The content of `store.json`. Raises `DataError` if there is no finished store or the file is damaged."""
    if is_missing(path):
        raise DataError(
            f"{path}: no token store here; create it with: boost prepare INPUT --out {shlex.quote(str(path))}"
        )
    if not path.exists():
        if (old := path.with_name(f"{path.name}.boost-old")).exists():
            raise DataError(f"{path}: its replacement was interrupted; rerun 'boost prepare' or rename {old} to {path}")
        raise DataError(f"{path}: its preparation was interrupted; rerun the same 'boost prepare' command to continue")
    try:
        meta = json.loads(read_text(path / STORE_FILE))
        if meta["format"] == FORMAT:
            _check_shape(meta)
    except (FileNotFoundError, NotADirectoryError):
        what = f"not a token store (no {STORE_FILE}); create one with: boost prepare INPUT --out STORE"
        raise DataError(f"{path}: {what}") from None
    except OSError as error:
        raise file_error(path, STORE_FILE, error) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(path, f"{STORE_FILE} is damaged ({type(error).__name__}: {error})") from error
    if meta["format"] != FORMAT:
        what = f"the store has format {meta['format']} ({STORE_FILE}), but this version of boost reads format {FORMAT}"
        raise damaged(path, what)
    return dict(meta)


def _check_shape(meta: JsonObject) -> None:
    """Accesses every field that is used later, so that a damaged file fails here instead of during training."""
    for key in ("tokenizer_fingerprint", "input_fingerprint", "options", "report"):
        meta[key]
    vocab_size = int(meta["vocab_size"])
    if meta["dtype"] != token_dtype(vocab_size).str or not 0 <= int(meta["eos"]["id"]) < vocab_size:
        raise ValueError("dtype, vocab_size and eos are inconsistent")
    for name in SPLITS:
        meta["splits"][name]["sha256"]
        if min(int(meta["splits"][name][key]) for key in ("tokens", "documents", "bytes", "largest_token")) < 1:
            raise ValueError(f"split {name} is empty")
    files = {REPORT_FILE, TOKENIZER_FILE, *(f"{name}.{kind}" for name in SPLITS for kind in ("tokens", "documents"))}
    if meta["blocks"].keys() != files or any(len(d) % (2 * DIGEST_BYTES) for d in meta["blocks"].values()):
        raise ValueError("the block digests are malformed or do not cover exactly the store's files")
    if with_digest(meta)["digest"] != meta["digest"]:
        raise ValueError("the digest does not match the content")


def with_digest(meta: JsonObject) -> JsonObject:
    """Returns the content of `store.json` or `resume.json` with its digest added."""
    content = {key: value for key, value in meta.items() if key != "digest"}
    return {**content, "digest": block_digest(json.dumps(content, sort_keys=True).encode())}


def file_error(path: Path, file: str, error: OSError) -> DataError:
    """The error for a file of a store that cannot be opened or read. Only a file that is missing or of a wrong kind is damage."""
    if isinstance(error, FileNotFoundError):
        return damaged(path, f"{file} is missing")
    if error.errno in (errno.EINVAL, errno.EFBIG):  # `require_regular`, `read_text`
        return damaged(path, f"{file} is {error.strerror}")
    return unreadable(path / file, error)


def damaged(path: Path, what: str) -> DataError:
    """The error for a damaged store."""
    return DataError(f"{path}: {what}; rebuild it with: boost prepare INPUT --out {shlex.quote(str(path))} --overwrite")
