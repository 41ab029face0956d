"""Builds lm-evaluation-harness tasks from the held-out text of a token store:

    python -m benchmarks.local_tasks STORE --out DIR
    boost eval RUN --tasks local_cloze,local_continuation,local_order --task-folder DIR --trust-task-code

    local_cloze          the next word, which the context contains (as in LAMBADA): perplexity, and accuracy of greedy decoding
    local_continuation   the true next words against three passages from elsewhere (as in HellaSwag); chance: 25%
    local_order          the true next words against the same words shuffled; chance: 50%

A model trained on the store's training split has not seen this text. Questions depend only on the text and the seed, so the same
store and options produce the same bytes. They compare models trained on one corpus; they are not a standard benchmark.
"""

import argparse
import itertools
import json
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from boost.data.store import TokenStore
from boost.errors import BoostError, DataError

CONTEXT = 400
"""Maximum number of characters of context, which starts at a word."""
WORDS = 8
"""Words per continuation."""
CHOICES = 4
LEAST = 20
"""Minimum questions per task; with fewer, a score is meaningless."""

GAP = re.compile(r"(?<=\S) (?=\S)")
"""A single space between words, at which a context may end."""
WORD = re.compile(r"(?<=\S )[^\W\d_]{4,}\b")
"""A word of at least four letters after a single space; a cloze may ask for it."""

Question = dict[str, Any]


@dataclass(frozen=True)
class LocalTask:
    """A task: how to make its questions, and the rest of its YAML file."""

    name: str
    make: "Callable[[Sequence[str], random.Random], Iterator[Question]]"
    """(documents, random numbers) -> a stream of candidate questions, which ends when the text runs out."""
    yaml: str


def cloze(documents: Sequence[str], rng: random.Random) -> Iterator[Question]:
    """Yields questions: a context and its next word, which the context contains."""
    places = [
        (number, match.start(), match.group())
        for number, text in enumerate(documents)
        for match in WORD.finditer(text, CONTEXT)
    ]
    rng.shuffle(places)
    for number, start, word in places:
        context = _context(documents[number], start - 1)
        if re.search(rf"\b{word}\b", context):
            yield {"context": context, "word": word}


def continuation(documents: Sequence[str], rng: random.Random) -> Iterator[Question]:
    """Yields questions: a context and its next words among wrong choices."""
    places = _places(documents, rng)
    for number, start in places:
        others = rng.sample(places, CHOICES - 1)
        choices = [_next_words(documents[number], start), *(_next_words(documents[n], s) for n, s in others)]
        if len(set(choices)) == CHOICES and all(len(each.split(" ")) == WORDS for each in choices):
            yield _shuffled(_context(documents[number], start), choices, rng)


def order(documents: Sequence[str], rng: random.Random) -> Iterator[Question]:
    """Yields questions: a context and its next words, in order and shuffled."""
    for number, start in _places(documents, rng):
        true = _next_words(documents[number], start)
        words = true.split(" ")
        rng.shuffle(words)
        if len(words) == WORDS and " ".join(words) != true:
            yield _shuffled(_context(documents[number], start), [true, " ".join(words)], rng)


def _places(documents: Sequence[str], rng: random.Random) -> list[tuple[int, int]]:
    """(document, index of a space) of every position with enough text before it, shuffled."""
    found = [(number, gap.start()) for number, text in enumerate(documents) for gap in GAP.finditer(text, CONTEXT)]
    rng.shuffle(found)
    return found


def _context(text: str, end: int) -> str:
    """At most CONTEXT characters before `end`, starting at a word."""
    start = max(end - CONTEXT, 0)
    cut = text[start:end]
    return cut if start == 0 else cut.partition(" ")[2] or cut


def _next_words(text: str, start: int) -> str:
    """The words after the space at `start`, joined by single spaces: line breaks or indentation would give the answer away."""
    return " ".join(text[start : start + 40 * WORDS].split()[:WORDS])


def _shuffled(context: str, choices: list[str], rng: random.Random) -> Question:
    """A multiple-choice question whose true answer is the first of `choices`."""
    order_of = list(range(len(choices)))
    rng.shuffle(order_of)
    return {"context": context, "choices": [choices[i] for i in order_of], "answer": order_of.index(0)}


_HEAD = """task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
  cache_dir: {cache}
test_split: test
metadata: {{version: 1.0, text: "{text}", seed: {seed}}}
"""
_CLOZE = """output_type: loglikelihood
doc_to_text: "{{context}}"
doc_to_target: " {{word}}"
metric_list:
  - metric: perplexity
  - metric: acc
"""
_CHOICE = """output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list:
  - metric: acc
  - metric: acc_norm
"""
TASKS = (
    LocalTask("local_cloze", cloze, _CLOZE),
    LocalTask("local_continuation", continuation, _CHOICE),
    LocalTask("local_order", order, _CHOICE),
)


def heldout_documents(store: TokenStore) -> list[str]:
    """The text of every held-out document, in the store's order."""
    split, tokenizer = store.split("heldout"), store.tokenizer()
    offsets = [int(each) for each in split.documents[: split.n_documents + 1]]
    return [
        tokenizer.decode(split.window(begin, end - begin - 1).tolist(), skip_special_tokens=False)
        for begin, end in itertools.pairwise(offsets)
    ]


def make_tasks(store: TokenStore, out: Path, questions: int, seed: int) -> dict[str, int]:
    """Writes the tasks and their questions to a folder. Returns the number of questions per task.

    Raises DataError if the held-out text is too short.
    """
    documents = heldout_documents(store)
    found = {}
    for task in TASKS:
        candidates = task.make(documents, random.Random(f"{seed} {task.name}"))
        found[task.name] = [question for _, question in zip(range(questions), candidates, strict=False)]
        if len(found[task.name]) < min(LEAST, questions):
            raise DataError(
                f"{store.path}: its held-out text yields only {len(found[task.name])} questions for {task.name}; at least "
                f"{LEAST} are needed; prepare a store with more held-out text (boost prepare --heldout)"
            )
    out.mkdir(parents=True, exist_ok=True)
    for task in TASKS:
        data = out / f"{task.name}.jsonl"
        data.write_text("".join(json.dumps(each) + "\n" for each in found[task.name]), encoding="utf-8")
        text = store.content("heldout")[:16]
        head = _HEAD.format(name=task.name, data=data.resolve(), cache=(out / "cache").resolve(), text=text, seed=seed)
        (out / f"{task.name}.yaml").write_text(head + task.yaml, encoding="utf-8")
    return {name: len(made) for name, made in found.items()}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path, help="a token store, such as data/stdlib")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="output folder for the tasks")
    parser.add_argument("--questions", type=int, default=400, metavar="N", help="questions per task (default 400)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed for choosing questions (default 0)")
    args = parser.parse_args(argv)
    if args.questions < 1:
        parser.error(f"--questions = {args.questions} is too small; smallest valid value: 1")
    try:
        made = make_tasks(TokenStore.open(args.store), args.out, args.questions, args.seed)
    except BoostError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name, count in made.items():
        print(f"{name}: {count} questions")
    return 0


if __name__ == "__main__":
    sys.exit(main())
