"""Several stores as one corpus: shares that stay within a sequence of the weights, one tokenizer, an identity without an order."""

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from boost.data.mixture import Corpus, MixedSplit, Proportions
from boost.data.prepare import PrepareOptions, prepare
from boost.data.store import Split, TokenStore
from boost.errors import ConfigError, DataError

LENGTH = 3000
WEIGHTS = st.fractions(Fraction(1, 1000), Fraction(1000), max_denominator=1000)


@pytest.mark.parametrize(("least", "most", "items"), [(2, 2, 0.5), (3, 3, 1.0), (4, 9, 1.7)])
def test_sources_stay_within_items_of_their_weights(least: int, most: int, items: float) -> None:
    """After any number of items. Of two by half an item, so that any window, a difference of two counts, is within one."""

    @settings(max_examples=10)
    @given(st.lists(WEIGHTS, min_size=least, max_size=most))
    def check(weights: list[Fraction]) -> None:
        shares = np.array([float(weight / sum(weights)) for weight in weights])
        # How many of the first n items each source has.
        proportions, counts = Proportions(weights), np.zeros((LENGTH + 1, len(weights)), dtype=np.int64)
        for position in range(LENGTH):
            source, earlier = proportions[position]
            assert earlier == counts[position, source]
            counts[position + 1] = counts[position]
            counts[position + 1, source] += 1
        assert np.abs(counts - np.arange(LENGTH + 1)[:, None] * shares).max() <= items + 1e-9

    check()


def test_one_source_takes_everything_and_far_positions_need_no_earlier_ones() -> None:
    assert [Proportions([Fraction(3)])[i] for i in (0, 7, 10**12)] == [(0, 0), (0, 7), (0, 10**12)]
    source, earlier = Proportions([Fraction(7), Fraction(3)])[10**12 - 1]
    assert earlier == {0: 7 * 10**11 - 1, 1: 3 * 10**11 - 1}[source]


def test_the_order_does_not_change_between_releases() -> None:
    # A change here would make every run resume onto other data.
    proportions = Proportions([Fraction(7), Fraction(3)])
    assert "".join(str(proportions[i][0]) for i in range(20)) == "01000100100100010010"


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Paths of stores: a and b have one tokenizer; c has another; d has that of a and another end-of-document token."""
    folder = tmp_path_factory.mktemp("mixture")

    def make(name: str, lines: int, **options: Any) -> str:
        text = folder / f"{name}.txt"
        text.write_text("".join(f"{name} {i} of {lines}, {'word ' * (i % 5)}\n" for i in range(lines)))
        prepare(PrepareOptions(out=folder / name, inputs=(str(text),), **options))
        return str(folder / name)

    a = make("a", 300, tokenizer="train:300")
    b = make("b", 200, tokenizer=a)
    c = make("c", 200, tokenizer="train:290")
    first = TokenStore.open(a)
    word = next(word for word, number in first.tokenizer().get_vocab().items() if number != first.eos)
    d = make("d", 200, tokenizer=a, eos=word)
    return {"a": a, "b": b, "c": c, "d": d}


def test_a_corpus_is_the_same_in_any_order_and_with_weights_of_any_sum(stores: dict[str, str]) -> None:
    a, b = stores["a"], stores["b"]
    one, other = Corpus.open({a: 0.3, b: 0.7}), Corpus.open({b: 7.0, a: 3.0})
    assert one.identity() == other.identity()
    assert one.names == other.names == ("b", "a") and one.weights == (Fraction(7, 10), Fraction(3, 10))
    assert Corpus.open({a: 0.31, b: 0.69}).identity()["content"] != one.identity()["content"]


def test_a_single_store_is_what_it_was_before_there_were_mixtures(stores: dict[str, str]) -> None:
    store = TokenStore.open(stores["a"])
    corpus = Corpus.open({stores["a"]: 0.2})
    assert isinstance(corpus.split("train"), Split)
    assert corpus.identity() == {
        "tokenizer": store.fingerprint, "eos": store.eos, "content": store.content("train")
    }  # fmt: skip


def test_what_cannot_be_mixed(stores: dict[str, str]) -> None:
    with pytest.raises(DataError, match=r"c: its tokenizer .* differs .* '.*a' in data.mixture"):
        Corpus.open({stores["a"]: 0.7, stores["c"]: 0.3})
    with pytest.raises(DataError, match=r"d: its documents end with token \d+, .* --eos"):
        Corpus.open({stores["a"]: 0.7, stores["d"]: 0.3})
    with pytest.raises(ConfigError, match="are the same store"):
        Corpus.open({stores["a"]: 0.7, f"{stores['a']}/../a": 0.3})


def test_names_are_unique(stores: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(stores["b"])
    # A link under the name of another store.
    corpus = Corpus.open({stores["a"]: 2.0, str(tmp_path / "a"): 1.0})
    assert corpus.names == (stores["a"], str(tmp_path / "a"))


def test_the_entropy_is_that_of_the_mixed_frequencies() -> None:
    def split(tokens: list[int]) -> Split:
        return Split("heldout", Path("S"), np.array(tokens, dtype=np.uint16), np.array([0, len(tokens)]), 1, 3, 0, 2)

    mixed = MixedSplit((split([0] * 10), split([1] * 7)), (Fraction(1, 4), Fraction(3, 4)), ("x", "y"))
    expected = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert mixed.unigram_entropy() == pytest.approx(expected)
