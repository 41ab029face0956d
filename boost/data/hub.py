"""Datasets from the Hugging Face Hub, streamed without a copy on disk. Never executes dataset code."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from boost.data.documents import Document, accept, missing_package
from boost.data.report import PrepareReport
from boost.errors import DataError


class HubSource:
    """One split of `NAME` or `NAME:CONFIG`, streamed by `datasets`. Keys are row numbers."""

    size: int | None = None

    def __init__(self, spec: str, split: str = "train", text_field: str = "text") -> None:
        self.dataset, _, config = spec.partition(":")
        self.config = config or None
        self.split, self.text_field = split, text_field
        self.name = f"Hugging Face {spec} ({split})"
        if Path(self.dataset).exists():
            raise DataError(f"--hf {self.dataset}: this is a local path; pass it as INPUT, without --hf")
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", self.dataset) or config.startswith("/"):
            raise DataError(f"--hf {spec}: not a dataset name; expected OWNER/NAME or OWNER/NAME:CONFIG")

    def documents(self, report: PrepareReport) -> Iterator[Document]:
        entry = report.source(self.name).file(self.dataset)
        rows = self._rows()
        for number, row in enumerate(rows):
            if self.text_field not in row:
                columns = ", ".join(map(str, list(row)[:20]))
                raise DataError(
                    f"{self.dataset}: no column {self.text_field!r}; choose one with --text-field: {columns}"
                )
            if document := accept(row[self.text_field], f"{self.dataset}:{number}", f"row {number}", entry):
                report.consumed += len(document.text)
                yield document

    def _rows(self) -> Iterator[dict[str, Any]]:
        try:
            import datasets
        except ImportError as error:
            raise missing_package("a Hugging Face dataset", "datasets") from error
        with quiet_hub():
            try:
                # Never trust_remote_code: a dataset is data, not a program.
                stream = datasets.load_dataset(self.dataset, self.config, split=self.split, streaming=True)
                yield from stream
            except (GeneratorExit, DataError):
                raise
            except Exception as error:
                # The library and its transports raise dozens of exception types; none of them is recoverable here.
                line = str(error).strip().splitlines()[0] if str(error).strip() else "no message"
                raise DataError(
                    f"--hf {self.dataset}: {type(error).__name__}: {line}; check the name, --hf-split and the network"
                ) from error

    def fingerprint(self) -> list[Any]:
        return [self.dataset, self.config, self.split]


@contextmanager
def quiet_hub() -> Iterator[None]:
    """Silences the five log lines per retry of the hub client. The error after the last retry is still raised."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
