"""The token store: data round-trips, and errors about damage say how to repair it."""

import json
import math
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from boost.data.blocks import FileArray
from boost.data.prepare import PrepareOptions, prepare
from boost.data.store import Split, TokenStore, token_dtype
from boost.data.tokenizer import tokenizer_fingerprint
from boost.errors import DataError
from tests.data.inputs import write_texts


@pytest.fixture
def store(tmp_path):
    texts = (f"Document {i}.\n" + "Ünïcode, 日本語 and words.\n" * (i % 4 + 1) for i in range(30))
    folder = write_texts(tmp_path / "texts", texts)
    return prepare(PrepareOptions(out=tmp_path / "store", inputs=(str(folder),), tokenizer="train:300")).store


def split_of(lengths, dtype=np.uint16):
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = np.arange(offsets[-1]).astype(dtype) % 7
    return Split("train", "STORE", tokens, offsets, n_bytes=1, vocab_size=7, eos=0, largest_token=6)


def test_arrays_are_read_when_asked_for(store):
    tokens, whole = store.split("train").tokens, np.fromfile(store.path / "train.tokens", dtype="<u2")
    assert tokens.dtype == whole.dtype and len(tokens) == len(whole)
    assert tokens[-1] == whole[-1] and tokens[3] - 10**6 == int(whole[3]) - 10**6, (
        "a Python integer: uint16 would overflow"
    )
    for where in (slice(None), slice(2, 9), slice(-4, None), slice(5, 5)):
        np.testing.assert_array_equal(tokens[where], whole[where])
    np.testing.assert_array_equal(np.asarray(tokens), whole)
    with pytest.raises(IndexError):
        tokens[len(whole)]
    with pytest.raises(ValueError):
        tokens[:3][0] = 1
    with pytest.raises(TypeError):
        tokens[0] = 1


def test_a_file_that_is_truncated_or_replaced_while_it_is_read(store):
    """A memory map would kill the process with SIGBUS."""
    split = store.split("train")
    file = store.path / "train.tokens"
    before = split.window(0, split.n_tokens)
    file.rename(store.path / "moved")
    file.write_bytes(b"other")
    np.testing.assert_array_equal(split.window(0, split.n_tokens), before)
    os.truncate(store.path / "moved", 40)
    np.testing.assert_array_equal(split.window(0, 20), before[:20])
    with pytest.raises(DataError, match=r"train\.tokens is shorter .*\(byte 40 is missing\)"):
        split.window(10, 20)
    os.truncate(store.path / "train.documents", 0)
    with pytest.raises(DataError, match=r"train\.documents is shorter"):
        split.document_ids(0, 20)


def test_a_token_beyond_the_vocabulary_is_named_before_it_is_an_index(store):
    split = store.split("train")
    with open(store.path / "train.tokens", "r+b") as file:
        file.seek(14)
        file.write(b"\xff\xff")
    assert split.window(0, 7).max() < 300
    with pytest.raises(DataError, match=r"train\.tokens contains token id 65535 near position 4"):
        split.window(4, 8)


def test_dtype_by_vocabulary():
    assert token_dtype(65536) == np.dtype("<u2")
    assert token_dtype(65537) == np.dtype("<u4")


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.data())
def test_document_ids_count_documents_from_the_windows_first(lengths, data):
    split = split_of(lengths)
    start = data.draw(st.integers(0, split.n_tokens - 1))
    length = data.draw(st.integers(1, split.n_tokens - start))
    whole = np.repeat(np.arange(len(lengths)), lengths)[start : start + length]
    ids = split.document_ids(start, length)
    assert ids.dtype == np.int32
    np.testing.assert_array_equal(ids, whole - whole[0])


def test_window_beyond_the_end_is_an_error_not_a_short_array():
    split = split_of([5])
    with pytest.raises(IndexError):
        split.window(3, 3)
    with pytest.raises(IndexError):
        split.document_ids(-1, 2)


def test_unigram_entropy_is_in_nats():
    split = split_of([8])
    object.__setattr__(split, "tokens", np.array([0, 1, 2, 3] * 5, dtype=np.uint16))
    assert split.unigram_entropy() == pytest.approx(math.log(4))


def edit_meta(store, **changes):
    file = store.path / "store.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def truncate(store):
    file = store.path / "train.tokens"
    file.write_bytes(file.read_bytes()[:-2])


def swap_tokenizer(store):
    file = store.path / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["merges"] = content["model"]["merges"][:-1]
    file.write_text(json.dumps(content))


def move_the_end(store):
    offsets = np.fromfile(store.path / "train.documents", dtype="<i8")
    offsets[-1] += 1
    offsets.tofile(store.path / "train.documents")


DAMAGES = {
    "fewer bytes than": (truncate, r"train\.tokens has \d+ bytes, but store\.json expects \d+"),
    "other offsets": (move_the_end, r"train\.documents does not span the \d+ tokens"),
    "other tokenizer": (swap_tokenizer, "not the tokenizer that produced the tokens"),
    "no offsets": (lambda s: (s.path / "heldout.documents").unlink(), r"heldout\.documents is missing"),
    "no tokenizer": (lambda s: (s.path / "tokenizer.json").unlink(), r"tokenizer\.json is missing"),
    "truncated store.json": (lambda s: (s.path / "store.json").write_text('{"format": 1,'), r"store\.json is damaged"),
    "not an object": (lambda s: (s.path / "store.json").write_text("[]"), r"store\.json is damaged"),
    "no splits": (lambda s: edit_meta(s, splits={}), r"store\.json is damaged"),
    "wrong dtype": (lambda s: edit_meta(s, dtype="<u4"), "are inconsistent"),
    "newer format": (lambda s: edit_meta(s, format=99), r"has format 99 \(store\.json\)"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_one_line_that_names_the_command_that_fixes_it(store, name):
    damage, message = DAMAGES[name]
    damage(store)
    with pytest.raises(DataError, match=message) as caught:
        TokenStore.open(store.path)
    assert "boost prepare" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["store.json", "tokenizer.json", "train.tokens", "heldout.documents"])
def test_only_regular_files_are_opened(store, endless, name):
    endless(store.path / name)
    with pytest.raises(DataError, match=r"boost prepare"):
        TokenStore.open(store.path)
    with pytest.raises(DataError, match="not a regular file"):
        FileArray(store.path / name, np.dtype("u1"))


def test_missing_store_and_foreign_folder(tmp_path):
    with pytest.raises(
        DataError, match=r"no token store here; create it with: boost prepare INPUT --out '.*/no where'$"
    ):
        TokenStore.open(tmp_path / "no where")
    with pytest.raises(DataError, match="not a token store"):
        TokenStore.open(tmp_path)


def test_another_tokenizer_is_refused(store):
    store.require_tokenizer(tokenizer_fingerprint(store.tokenizer()), "the checkpoint")
    with pytest.raises(DataError, match="differs from that of runs/a"):
        store.require_tokenizer("0" * 64, "runs/a")
