"""The command that a missing store needs."""

import shlex

import pytest

from boost.config import load
from boost.data.fit import prepare_command

C4 = "boost prepare --hf allenai/c4:en --max-tokens {} --heldout-split validation --max-heldout-tokens 10000000 --tokenizer t5-base"
MIXED = ("--data.mixture", '{ "data/c4" = 3, "data/mine" = 1 }')


@pytest.mark.parametrize(
    ("preset", "words", "store", "command"),
    [
        ("cola-130m", (), "data/c4", C4.format(2621440000)),
        ("demo", (), "data/stdlib", "boost prepare --stdlib"),
        ("demo", ("--data.store", "data/mine"), "data/mine", "boost prepare INPUT --tokenizer train:4096"),
        ("demo", ("--data.store", "my data"), "my data", "boost prepare INPUT --tokenizer train:4096"),
        # Its share of the tokens, and the tokenizer of the first store.
        ("cola-130m", MIXED, "data/c4", C4.format(2621440000 * 3 // 4)),
        ("cola-130m", MIXED, "data/mine", "boost prepare INPUT --tokenizer data/c4"),
    ],
)
def test_the_command_of_a_missing_store(preset: str, words: tuple[str, ...], store: str, command: str) -> None:
    assert prepare_command(load(preset, list(words)), store) == f"{command} --out {shlex.quote(store)}"
