"""Preparing a store: splits, no-ops, replacement, interruption, full disks."""

import json
import os
import resource
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from boost.data import encode
from boost.data.prepare import PrepareOptions, Progress, prepare
from boost.data.readers import Document
from boost.data.report import FileReport
from boost.data.split import SplitRule, choose_split, key_hash, split_position
from boost.data.store import TokenStore
from boost.data.tokenizer import parse_tokenizer
from boost.data.writer import locked, sibling
from boost.errors import DataError, StorageError
from tests.data.inputs import content, texts_of, write_texts


@pytest.fixture
def corpus(tmp_path):
    return write_texts(tmp_path / "texts", (f"file {i}\n" + f"some words of number {i}\n" * 5 for i in range(40)))


def options(corpus, **changes):
    return PrepareOptions(
        **{"out": corpus.parent / "store", "inputs": (str(corpus),), "tokenizer": "train:300", **changes}
    )


def names_beside(corpus):
    return sorted(path.name for path in corpus.parent.iterdir())


def test_report_store_and_files_agree(corpus):
    (corpus / "empty.txt").write_text("")
    result = prepare(options(corpus))
    (source,) = result.store.report["sources"]
    splits = [result.store.split(name) for name in ("train", "heldout")]
    assert source["files"] == source["documents"] == sum(split.n_documents for split in splits) == 40
    assert source["tokens"] == sum(split.n_tokens for split in splits)
    assert source["bytes"] == sum(split.n_bytes for split in splits) == sum(p.stat().st_size for p in corpus.iterdir())
    assert source["skipped"] == {"empty": {"count": 1, "examples": ["empty.txt"]}}
    assert names_beside(corpus) == ["store", "texts"]


def test_the_tokenizer_sees_the_train_split_only(corpus):
    for path in corpus.iterdir():
        path.write_text("zqzqzqzq " * 50 if key_hash(path.name) < 0.2 else "common words here " * 50)
    store = prepare(options(corpus, heldout=0.2)).store
    assert "zqzq" in texts_of(store, "heldout")[0]
    assert not any("zq" in token for token in store.tokenizer().get_vocab())


def test_running_again_is_a_no_op(corpus):
    first = prepare(options(corpus))
    before = {path: path.stat().st_mtime_ns for path in first.store.path.iterdir()}
    phases = []

    class Recorder(Progress):
        def phase(self, name, total):
            phases.append(name)

    again = prepare(options(corpus), Recorder())
    assert not first.up_to_date and again.up_to_date and not phases
    assert before == {path: path.stat().st_mtime_ns for path in first.store.path.iterdir()}
    assert again.store.report == first.store.report


CHANGES = {
    "new file": lambda corpus: (corpus / "new.txt").write_text("more"),
    "edited file": lambda corpus: (corpus / "00.txt").write_text("other"),
    "touched file": lambda corpus: os.utime(corpus / "00.txt", ns=(0, 0)),
    "removed file": lambda corpus: (corpus / "00.txt").unlink(),
    "tokenizer": {"tokenizer": "train:290"},
    "heldout": {"heldout": 0.3},
    "limit": {"max_documents": 9},
    "text field": {"text_field": "text"},
}


@pytest.mark.parametrize(
    ("file", "spec"),
    [
        ("tokenizer_config.json", "folder"), ("tokenizer_config.json", "file"), ("special_tokens_map.json", "folder"),
        ("added_tokens.json", "folder"),
    ],
)  # fmt: skip
def test_a_tokenizer_with_another_file_is_other_input(corpus, tmp_path, file, spec):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    tokenizer = prepare(options(corpus, out=tmp_path / "t")).store.tokenizer()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "model.safetensors").write_text("not a tokenizer's")
    given = options(corpus, tokenizer=str(folder / "tokenizer.json" if spec == "file" else folder))
    prepare(given)
    (folder / "model.safetensors").write_text("other")
    assert prepare(given).up_to_date
    added = {"<|end|>": tokenizer.token_to_id("<|end|>")}
    (folder / file).write_text(json.dumps(added if file == "added_tokens.json" else {"eos_token": "<|end|>"}))
    with pytest.raises(DataError, match="add --overwrite to replace it"):
        prepare(given)
    eos = prepare(PrepareOptions(**{**vars(given), "overwrite": True})).store.meta["eos"]["token"]
    names_it = file in ("tokenizer_config.json", "special_tokens_map.json")
    assert eos == ("<|end|>" if names_it else "<|endoftext|>")


def test_a_tokenizer_on_the_hub_counts_by_its_content(corpus, tmp_path, monkeypatch):
    first = prepare(options(corpus, out=tmp_path / "t")).store.tokenizer()
    second = parse_tokenizer(first.to_str())
    second.add_tokens(["new"])
    hub = {"someone/model": first}
    for module in ("prepare", "tokenizer"):
        monkeypatch.setattr(f"boost.data.{module}.load_tokenizer", lambda name, notes=None: hub[name])
    monkeypatch.setattr("boost.data.tokenizer._configured_eos", lambda spec: "")
    given = options(corpus, tokenizer="someone/model")
    prepare(given)
    assert prepare(given).up_to_date
    hub["someone/model"] = second
    with pytest.raises(DataError, match="add --overwrite to replace it"):
        prepare(given)


def test_another_version_of_boost_is_other_input(corpus, monkeypatch):
    prepare(options(corpus))
    monkeypatch.setattr("boost.data.prepare.__version__", "0.0.0")
    with pytest.raises(DataError, match="add --overwrite to replace it"):
        prepare(options(corpus))


@pytest.mark.parametrize("name", CHANGES)
def test_other_input_needs_overwrite(corpus, name):
    store = prepare(options(corpus)).store.path
    before, change = content(store), CHANGES[name]
    changed = options(corpus, **change) if isinstance(change, dict) else options(corpus)
    if callable(change):
        change(corpus)
    with pytest.raises(DataError, match="add --overwrite to replace it"):
        prepare(changed)
    assert content(store) == before
    result = prepare(PrepareOptions(**{**vars(changed), "overwrite": True}))
    assert not result.up_to_date and content(store)["store.json"] != before["store.json"]
    assert names_beside(corpus) == ["store", "texts"]


def test_a_damaged_store_is_rebuilt_on_request_only(corpus):
    store = prepare(options(corpus)).store.path
    (store / "train.tokens").write_bytes(b"")
    with pytest.raises(DataError, match=r"train\.tokens has 0 bytes.*--overwrite"):
        prepare(options(corpus))
    assert not prepare(options(corpus, overwrite=True)).up_to_date
    TokenStore.open(store)


def test_a_folder_of_the_user_is_never_replaced(corpus):
    for overwrite in (False, True):
        with pytest.raises(DataError, match="exists but is not a token store"):
            prepare(options(corpus, out=corpus, overwrite=overwrite))
    assert len(list(corpus.iterdir())) == 40
    empty = corpus.parent / "empty"
    empty.mkdir()
    assert prepare(options(corpus, out=empty)).store.path == empty


def test_same_input_elsewhere_gives_the_same_bytes(corpus, tmp_path):
    first = prepare(options(corpus)).store.path
    second = prepare(options(corpus, out=tmp_path / "deep" / "er")).store.path
    one, two = content(first), content(second)
    assert all(one[name] == two[name] for name in one if name != "store.json")


def test_wide_vocabularies_need_wide_tokens(corpus, tmp_path):
    words = ["<unk>", "</s>", *(f"w{i}" for i in range(70_000))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "wide.json"))
    (corpus / "z.txt").write_text("w69999")
    store = prepare(options(corpus, tokenizer=str(tmp_path / "wide.json"))).store
    assert store.vocab_size > 70_000 and store.split("train").tokens.dtype == np.dtype("<u4")
    assert store.vocab_size - 1 in np.concatenate([store.split(name).tokens for name in ("train", "heldout")])


def test_unknown_tokens_are_reported(corpus, tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "words": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "words.json"))
    store = prepare(options(corpus, tokenizer=str(tmp_path / "words.json"))).store
    unknown = sum(int(store.split(name).token_counts()[0]) for name in ("train", "heldout"))
    assert unknown == 40 * (2 + 5 * 4)
    (note,) = store.report["notes"]
    assert note.startswith(f"count of the unknown token: {unknown}; ")


def test_long_documents_are_encoded_in_pieces(corpus, monkeypatch):
    whole = prepare(options(corpus)).store
    monkeypatch.setattr(encode, "PIECE_CHARS", 40)
    monkeypatch.setattr(encode, "BATCH_CHARS", 100)
    pieces = prepare(options(corpus, out=corpus.parent / "b", tokenizer=str(whole.path))).store
    for name in ("train", "heldout"):
        np.testing.assert_array_equal(whole.split(name).tokens, pieces.split(name).tokens)
        np.testing.assert_array_equal(whole.split(name).documents, pieces.split(name).documents)


def test_a_single_document_is_cut_at_a_line(tmp_path):
    lines = [f"line number {i} of the book\n" for i in range(400)]
    (tmp_path / "book.txt").write_text("".join(lines))
    store = prepare(
        PrepareOptions(out=tmp_path / "s", inputs=(str(tmp_path / "book.txt"),), tokenizer="train:300")
    ).store
    (train,), (heldout,) = (texts_of(store, name) for name in ("train", "heldout"))
    assert train + heldout == "".join(lines) and heldout.startswith("line number ")
    assert 0.01 < len(heldout) / len(train) < 0.04
    assert any("a single document" in note for note in store.report["notes"])


@settings(deadline=None, max_examples=50)
@given(st.text(min_size=2), st.floats(0.01, 0.99))
def test_both_parts_of_a_cut_text_hold_something(text, heldout):
    assert 0 < split_position(text, heldout) < len(text)


@settings(deadline=None, max_examples=50)
@given(st.sets(st.text(), min_size=2, max_size=6), st.sampled_from([1e-9, 0.05, 0.5, 1 - 1e-9]))
def test_no_split_is_empty(keys, heldout):
    documents = [Document(key, "text", FileReport("f")) for key in sorted(keys)]
    rule = choose_split(sorted(keys), heldout)
    assert {name for document in documents for name, _ in rule.parts(document)} == {"train", "heldout"}


def test_a_split_depends_on_the_key_alone():
    keys = [str(i) for i in range(4000)]
    assert choose_split(keys, 0.05) == choose_split(keys[::-1], 0.05) == SplitRule(0.05)
    documents = [Document(key, "text", FileReport("f")) for key in keys]
    share = sum(SplitRule(0.05).parts(document) == [("heldout", "text")] for document in documents) / 4000
    assert 0.04 < share < 0.06


def test_empty_corpora_say_what_was_skipped(tmp_path):
    folder = tmp_path / "none"
    folder.mkdir()
    with pytest.raises(DataError, match="the corpus is empty: no input was found"):
        prepare(options(folder))
    (folder / "a.txt").write_text("")
    (folder / "b.bin.txt").write_bytes(b"a\0b")
    with pytest.raises(DataError, match=r"2 skipped: 1 empty \(a\.txt\), 1 binary .*: byte 1\)"):
        prepare(options(folder))
    (folder / "c.txt").write_text("x")
    with pytest.raises(DataError, match="single character"):
        prepare(options(folder))
    assert names_beside(folder) == ["none"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heldout": 0.0}, "--heldout 0.0"),
        ({"heldout": float("nan")}, "--heldout nan"),
        ({"max_documents": 0}, "--max-documents 0"),
        ({"max_tokens": 0}, "--max-tokens 0 must be at least 1"),
        ({"max_heldout_tokens": -1}, "--max-heldout-tokens -1"),
        ({"heldout_split": "validation"}, "--heldout-split validation needs --hf"),
        ({"heldout_split": "validation", "hf": "a/b", "heldout_from": ("x",)}, "conflicts with --heldout-from"),
        ({"heldout_split": "train", "hf": "a/b"}, "is also the training split"),
        ({"hf_split": "validation"}, "--hf-split validation has no effect without --hf; remove it"),
        ({"hf_revision": "main"}, "--hf-revision main has no effect without --hf; remove it"),
        (
            {"heldout": 0.1, "heldout_from": ("x",)},
            "--heldout 0.1 has no effect with --heldout-split or --heldout-from",
        ),
        ({"heldout": 0.1, "heldout_split": "test", "hf": "a/b"}, "--heldout 0.1 has no effect with --heldout-split"),
        (
            {"inputs": (), "stdlib": True, "text_field": "body"},
            "--text-field body has no effect on the standard library",
        ),
        ({"out": Path("/")}, "must name a folder"),
    ],
)
def test_options_are_checked_before_anything_is_read(corpus, change, message):
    with pytest.raises(DataError, match=message):
        prepare(options(corpus, **change))


def test_limit_of_documents(corpus):
    store = prepare(options(corpus, max_documents=7)).store
    assert sum(store.split(name).n_documents for name in ("train", "heldout")) == 7
    assert store.report["notes"][-1] == "only the first 7 documents were read (--max-documents)"


def test_two_runs_at_once_do_not_meet(corpus):
    out = options(corpus).out
    with locked(out), pytest.raises(DataError, match="another 'boost prepare' is writing it"):
        prepare(options(corpus))
    prepare(options(corpus))
    assert names_beside(corpus) == ["store", "texts"]


def test_an_interrupted_run_leaves_nothing_that_looks_finished(corpus, monkeypatch):
    monkeypatch.setattr("boost.data.encode.BATCH_CHARS", 200)
    store = prepare(options(corpus)).store.path
    before, unfinished, written = content(store), sibling(store, "tmp"), []

    class Interrupt(Progress):
        def phase(self, name, total):
            self.name = name

        def update(self, consumed, documents):
            if self.name == "encoding" and documents == 20:
                written.append((unfinished / "train.tokens").stat().st_size)
                with pytest.raises(DataError):
                    TokenStore.open(unfinished)
                raise KeyboardInterrupt

    other = options(corpus, tokenizer="train:280", overwrite=True)
    with pytest.raises(KeyboardInterrupt):
        prepare(other, Interrupt())
    assert written[0] > 0 and names_beside(corpus) == ["store", "texts"] and content(store) == before
    assert not prepare(other).up_to_date


def test_a_full_disk_is_one_line_and_costs_nothing(corpus):
    before = content(prepare(options(corpus)).store.path)
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, usual[1]))
    try:
        with pytest.raises(StorageError, match="store: File too large while writing; nothing was changed") as caught:
            prepare(options(corpus, tokenizer="train:280", overwrite=True))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert "\n" not in str(caught.value)
    assert names_beside(corpus) == ["store", "texts"] and content(options(corpus).out) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: (c / "05.txt").write_text("other"), r"05\.txt changed during preparation"),
        (lambda c: (c / "05.txt").unlink(), r"05\.txt disappeared during preparation"),
    ],
    ids=["written", "removed"],
)
def test_input_that_changes_between_passes_is_noticed(corpus, change, message):
    class Change(Progress):
        def phase(self, name, total):
            if name == "encoding":  # the pass after the one that trains the tokenizer
                change(corpus)

    before = content(prepare(options(corpus)).store.path)
    (corpus / "99.txt").write_text("more")
    with pytest.raises(DataError, match=message + ".*nothing was written; run the command again"):
        prepare(options(corpus, overwrite=True), Change())
    assert names_beside(corpus) == ["store", "texts"] and content(options(corpus).out) == before


def test_a_file_that_grows_while_it_is_read_is_noticed(corpus):
    class Grow(Progress):
        def update(self, consumed, documents):
            if documents == 7:
                with open(corpus / "06.txt", "a") as file:
                    file.write("more")

    with pytest.raises(DataError, match=r"06\.txt changed during preparation"):
        prepare(options(corpus), Grow())


def test_a_limit_that_leaves_no_text_to_hold_out_is_named(corpus):
    for file in corpus.iterdir():  # long documents: each fills a batch
        file.write_text(file.read_text() * 800)
    with pytest.raises(DataError, match="held-out text is empty: --max-tokens came first"):
        prepare(options(corpus, max_tokens=1, heldout=0.01))
