"""The options of `boost prepare`, and its progress callbacks."""

from dataclasses import dataclass
from pathlib import Path

from boost.errors import DataError


@dataclass(frozen=True)
class PrepareOptions:
    """Options of `boost prepare`. Raises `DataError` if one is not valid."""

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
    """Files or folders that become the held-out text, instead of a fraction of the documents."""
    max_documents: int | None = None
    """Stop after this many documents, not counting those of `heldout_split` and `heldout_from`."""
    max_tokens: int | None = None
    """Stop after the document that reaches this many training tokens."""
    max_heldout_tokens: int | None = None
    """The same limit for the held-out split."""
    overwrite: bool = False
    """Replace an existing store that was made from different input."""

    def __post_init__(self) -> None:
        if not 0.0 < self.heldout < 1.0:
            raise DataError(f"--heldout {self.heldout} must be a fraction between 0 and 1, such as 0.05")
        for name in ("max_documents", "max_tokens", "max_heldout_tokens"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise DataError(f"--{name.replace('_', '-')} {value} must be at least 1")
        if self.heldout_split is not None and (self.hf is None or self.heldout_from):
            problem = "conflicts with --heldout-from; use one of them" if self.heldout_from else "needs --hf"
            raise DataError(f"--heldout-split {self.heldout_split} {problem}")
        if self.heldout_split is not None and self.heldout_split == self.hf_split:
            raise DataError(f"--heldout-split {self.heldout_split} is also the training split; choose another split")
        chosen_heldout = self.heldout_split is not None or bool(self.heldout_from)
        only_stdlib = self.stdlib and not (self.inputs or self.heldout_from) and self.hf is None
        for name, is_unused, why in (
            ("hf_split", self.hf is None, "without --hf"),
            ("hf_revision", self.hf is None, "without --hf"),
            ("heldout", chosen_heldout, "with --heldout-split or --heldout-from"),
            ("text_field", only_stdlib, "on the standard library"),
        ):
            if is_unused and (value := getattr(self, name)) != getattr(PrepareOptions, name):
                raise DataError(f"--{name.replace('_', '-')} {value} has no effect {why}; remove it")


class Progress:
    """Progress callbacks of `prepare`; this base class does nothing."""

    def phase(self, name: str, total: int | None) -> None:
        """Called when a phase begins. `total`: input bytes that it will read; None if unknown."""

    def update(self, consumed: int, documents: int) -> None:
        """Called with the numbers of input bytes and documents processed so far in this phase."""

    def close(self) -> None:
        """Called after the last phase, or after an error."""
