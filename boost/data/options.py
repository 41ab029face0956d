"""The options of `boost prepare`, and its progress callbacks."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class PrepareOptions:
    """Options of `boost prepare`."""

    out: Path
    """Folder for the token store."""
    inputs: tuple[str, ...] = ()
    """Text, JSON, Parquet or Arrow files, or folders of such files."""
    stdlib: bool = False
    """Read the Python standard library on this machine."""
    hf: str | None = None
    """NAME or NAME:CONFIG of a Hugging Face dataset."""
    hf_split: str = "train"
    """Split of the dataset to read."""
    hf_revision: str | None = None
    """Branch, tag or commit of the dataset's repository; None: its main branch. The store records the commit that was read."""
    from_tokens: str | None = None
    """Token ids that another tool wrote (`boost.data.from_tokens`), instead of text."""
    token_dtype: str = "uint16"
    """`uint16` or `uint32`: type of the ids in a .bin file without a header."""
    tokenizer: str = "train:4096"
    """`train:SIZE`, a tokenizer.json or its folder, or a tokenizer's name on the Hugging Face Hub."""
    eos: str | None = None
    """End-of-document token; None: the tokenizer's configured token, or a usual one such as </s>."""
    text_field: str | None = None
    """Field or column with the text; None: `text`, `content`, or the only one that holds strings."""
    heldout: float = 0.02
    """Fraction of the documents to hold out, between 0 and 1."""
    heldout_split: str | None = None
    """Split of the dataset that becomes the held-out text, instead of a fraction of the documents."""
    heldout_from: tuple[str, ...] = ()
    """Files or folders that become the held-out text (or token ids), instead of a fraction of the documents."""
    max_documents: int | None = None
    """Stop after this many documents, not counting those of `heldout_split` and `heldout_from`."""
    max_tokens: int | None = None
    """Stop after the document that reaches this many training tokens."""
    max_heldout_tokens: int | None = None
    """The same limit for the held-out split."""
    overwrite: bool = False
    """Replace an existing store that was made from different input."""


class Progress:
    """Progress callbacks of `prepare`; this base class does nothing."""

    def phase(self, name: str, total: int | None) -> None:
        """Called when a phase begins. `total`: input bytes that it will read; None if unknown."""

    def update(self, consumed: int, documents: int) -> None:
        """Called with the numbers of input bytes and documents processed so far in this phase."""

    def close(self) -> None:
        """Called after the last phase, or after an error."""
