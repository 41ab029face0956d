"""`boost prepare`: tokenizes text into a token store, with progress on stderr and a report on stdout."""

import argparse
import dataclasses
import json
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from boost.cli.terminal import add_options, print_rows
from boost.format import format_bytes
from boost.text import JsonObject, printable

if TYPE_CHECKING:
    from boost.data.prepare import PrepareResult, Progress

EPILOG = """\
examples:
  boost prepare --stdlib                          the Python standard library on this machine, into data/stdlib
  boost prepare notes/ book.txt --out data/mine   your texts, with a tokenizer trained on them
  boost prepare posts.jsonl --text-field body     one document per line
  boost prepare --hf roneneldan/TinyStories --max-documents 100000 --tokenizer gpt2
  boost prepare corpus/ --tokenizer runs/a/tokenizer.json --overwrite
  boost prepare --hf allenai/c4:en --max-tokens 1300000000 --heldout-split validation --max-heldout-tokens 10000000 \\
                --tokenizer t5-base --out data/c4       as in examples/recipes/c4-60m.sh

Without --out, the store is data/stdlib or data/NAME, where NAME comes from the first input. Running the same command
again does nothing if the input is unchanged. An interrupted run leaves no store; an existing store is kept until the new
one is complete. After a crash, a broken connection or a full disk, run the same command to continue (it saves every 30 s).

The suffix determines the format: .jsonl .ndjson (one JSON object per line), .json (the same, or one array),
.parquet, .arrow, and save_to_disk folders; anything else is text, one document per file. Of a folder with splits (train,
validation, test), only the train split is read. .gz .zst .bz2 .xz are decompressed, CRLF line breaks become LF, and
documents of more than 16M characters are split. In folders, unreadable files are skipped and reported; a file that you
name must be readable. Pickles and other formats that can contain code are rejected.

A fraction of the documents is held out, chosen by a hash of their names. If there is only one document, its last part is
held out. With --heldout-split or --heldout-from, that text is held out and all other documents are for training.
"""


OPTIONS = {
    "--stdlib": "read this machine's Python standard library",
    "--hf NAME[:CONFIG]": "stream a dataset from the Hugging Face Hub",
    "--hf-split SPLIT": "split of the dataset to read (default: %(default)s)",
    "--hf-revision REV": "branch, tag or commit of the dataset (default: its main branch); the store names the commit that was "
    "read",
    "--out STORE": "folder of the token store (default: data/NAME, named after the first input)",
    "--tokenizer TOKENIZER": "train:SIZE for a new byte-level BPE, a tokenizer.json or its folder, or a name on the Hugging Face "
    "Hub (default: %(default)s)",
    "--eos TOKEN": "end-of-document token (default: the tokenizer's eos_token, or else the first common one found, such as </s>)",
    "--text-field FIELD": "field or column with the text (default: 'text', else 'content', else the only one that holds strings)",
    "--heldout FRACTION": "fraction of the documents to hold out (default: %(default)s)",
    "--heldout-split SPLIT": "split of the --hf dataset to hold out, such as validation",
    "--heldout-from PATH...": "file or folder with the held-out text; may be repeated",
    "--max-documents N": "read at most N documents, not counting held-out sources",
    "--max-tokens N": "stop after the document that reaches N training tokens",
    "--max-heldout-tokens N": "stop holding out documents once N tokens are held out",
    "--overwrite": "replace a store made from different input or options",
    "--json": "print the report as JSON and show no progress",
}


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "prepare",
        description="Reads text, trains or loads a tokenizer, and writes a token store for 'boost train'.",
        epilog=EPILOG,
    )
    parser.add_argument(
        "inputs",
        nargs="*",
        metavar="INPUT",
        help="text, JSON, Parquet or Arrow files, compressed or not, or folders of them",
    )
    add_options(parser, OPTIONS, hf_split="train", tokenizer="train:4096", heldout=0.02, heldout_from=[])
    return parser


def run(args: argparse.Namespace) -> int:
    from boost.data.prepare import PrepareOptions, prepare

    args.out = Path(args.out or default_out(args.inputs, args.hf, args.stdlib))
    args.inputs, args.heldout_from = tuple(args.inputs), tuple(args.heldout_from)
    options = PrepareOptions(**{field.name: getattr(args, field.name) for field in dataclasses.fields(PrepareOptions)})
    result = prepare(options, None if args.json else progress_display())
    if args.json:
        print(json.dumps(as_json(result), indent=2))
    else:
        print_report(result)
    return 0


def default_out(inputs: list[str], hf: str | None, stdlib: bool) -> str:
    """Returns `data/stdlib`, or `data/` and the first input's name without folders and suffixes."""
    if inputs:
        path = Path(inputs[0])
        name = (path if path.name not in ("", "..") else path.resolve()).name
        name = name if path.is_dir() else re.sub(r"(\.\w+?)(\.(gz|zst|bz2|xz))?$", "", name)
    elif hf and not stdlib:
        name = re.split(r"[/:]", hf.partition(":")[0])[-1]
    else:
        name = "stdlib"
    return f"data/{name or 'corpus'}"


def as_json(result: "PrepareResult") -> JsonObject:
    """Converts the report to JSON values: entropy in nats per token, the rest in tokens, documents and bytes."""
    store = result.store
    splits = {}
    for name, sizes in store.meta["splits"].items():
        split = store.split(name)
        density = split.n_bytes / split.n_tokens
        splits[name] = {**sizes, "bytes_per_token": density, "unigram_entropy": split.unigram_entropy()}
    return {
        "store": str(store.path),
        "up_to_date": result.up_to_date,
        "seconds": round(result.seconds, 3),
        "vocab_size": store.vocab_size,
        "eos": store.meta["eos"],
        "tokenizer_fingerprint": store.fingerprint,
        "splits": splits,
        **store.report,
    }


def print_report(result: "PrepareResult") -> None:
    """Prints tables of the inputs, of changed and skipped documents with the reasons, and of the store's contents."""
    report = as_json(result)
    keys, rows = ("documents", "bytes", "tokens"), []
    for source in report["sources"]:
        skipped = sum(skip["count"] for skip in source["skipped"].values())
        rows.append(
            [source["name"], *(f"{number:,}" for number in (*(source[key] for key in ("files", *keys)), skipped))]
        )
    numbers = ("files", *keys, "skipped")
    print_rows(("source", *numbers), rows, right=numbers, piped_width=200, title="read")
    _print_reasons(report["sources"], "notes")
    _print_reasons(report["sources"], "skipped")
    rows = []
    for name, split in report["splits"].items():
        entropy = f"{split['unigram_entropy']:.4f} nats/token"
        rows.append([name, *(f"{split[key]:,}" for key in keys), f"{split['bytes_per_token']:.3f}", entropy])
    numbers = (*keys, "bytes/token", "unigram entropy")
    print_rows(("split", *numbers), rows, right=numbers, piped_width=200, title="\nstore")
    for note in report["notes"]:
        print(printable(f"note: {note}"))
    state = "is up to date (nothing to do)" if result.up_to_date else f"written in {result.seconds:.1f} s"
    eos = f"eos {report['eos']['token']} (id {report['eos']['id']})"
    print(printable(f"\n{report['store']} {state}: vocab_size {report['vocab_size']}, {eos}", "\n"))


def _print_reasons(sources: list[JsonObject], what: str) -> None:
    """Prints the `notes`, or the `skipped` documents, for all sources."""
    if any(source[what] for source in sources):
        print(f"\n{what}")
    for source in sources:
        for reason, skip in source[what].items():
            print(printable(f"  {skip['count']:,} {reason}, in {source['name']}"))
            for example in skip["examples"]:
                print(printable(f"      {example}"))
            if skip["count"] > len(skip["examples"]):
                print(f"      and {skip['count'] - len(skip['examples']):,} more; see report.json in the store")


def progress_display() -> "Progress":
    """Returns a progress bar if stderr is a terminal, otherwise a line every 10 seconds."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress

    from boost.data.prepare import Progress

    class Bar(Progress):
        def __init__(self) -> None:
            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
            more = (TextColumn("{task.fields[documents]:,} documents"), TimeElapsedColumn())
            self.display = RichProgress(*columns, *more, console=Console(stderr=True), transient=True)

        def phase(self, name: str, total: int | None) -> None:
            for former in self.display.task_ids:
                self.display.remove_task(former)
            self.display.start()
            self.display.add_task(name, total=total, documents=0)

        def update(self, consumed: int, documents: int) -> None:
            self.display.update(self.display.task_ids[0], completed=consumed, documents=documents)

        def close(self) -> None:
            self.display.stop()

    class Lines(Progress):
        def phase(self, name: str, total: int | None) -> None:
            self.name, self.total, self.shown = name, total, time.monotonic()
            print(f"prepare: {name}", file=sys.stderr, flush=True)

        def update(self, consumed: int, documents: int) -> None:
            if time.monotonic() - self.shown >= 10:
                self.shown = time.monotonic()
                share = f" ({min(consumed / self.total, 1):.0%})" if self.total else ""
                text = f"prepare: {self.name}: {documents:,} documents, {format_bytes(consumed)}{share}"
                print(text, file=sys.stderr, flush=True)

    return Bar() if sys.stderr.isatty() else Lines()
