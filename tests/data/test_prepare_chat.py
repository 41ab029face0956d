"""`boost prepare --chat`: the mask in the store is that of the conversations, and training and evaluation take no other targets."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from boost.data import hub
from boost.data.chat import ChatTemplate
from boost.data.prepare import PrepareOptions, prepare
from boost.data.store import SPLITS, TokenStore
from boost.data.verify import verify
from boost.errors import DataError
from tests.data.chats import CHATML, MARKED, chat_store_in, chat_tokenizer, conversation, write_conversations

COUNT = 60


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    return chat_store_in(tmp_path_factory.mktemp("chat"))


def texts(store: TokenStore, split: str) -> list[tuple[str, str]]:
    """(text, text of the counted tokens) of every document."""
    found, part, tokenizer = [], store.split(split), store.tokenizer()
    assert part.targets is not None
    for start, end in zip(part.documents[:-1], part.documents[1:], strict=True):
        ids, mask = part.window(int(start), int(end - start)), part.targets.counted(int(start), int(end - start))
        decode = [tokenizer.decode(each.tolist(), skip_special_tokens=False) for each in (ids, ids[mask])]
        found.append((decode[0], decode[1]))
    return found


def test_every_conversation_is_a_document_with_its_answers_counted(store: TokenStore) -> None:
    template = ChatTemplate(store.path.parent / "tokenizer")
    expected = {}
    for number in range(COUNT):
        (document,) = template.encode(conversation(number))
        answers = [m["content"] + "<|im_end|>\n" for m in conversation(number) if m["role"] == "assistant"]
        expected[document.text.rstrip("\n")] = "".join(answers).removesuffix("\n")
    assert dict([*texts(store, "train"), *texts(store, "heldout")]) == expected, (
        "each ends with one <|im_end|>, which counts"
    )
    for name in SPLITS:
        part, sizes = store.split(name), store.meta["splits"][name]
        counted = [answer for _, answer in texts(store, name)]
        ends = sum(len("<|im_end|>") for _ in counted)  # the last one of each: written by the store
        assert sizes["target_bytes"] == sum(map(len, counted)) - ends
        assert part.targets is not None
        assert sizes["targets"] == int(part.targets.before(np.array([part.n_tokens]))[0]) == part.token_counts().sum()
    assert store.eos == store.tokenizer().token_to_id("<|im_end|>")
    assert store.is_masked
    assert store.chat == {"template": CHATML, "tokenizer": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}}


def test_a_second_time_does_nothing_and_another_template_is_another_store(tmp_path: Path) -> None:
    first = chat_store_in(tmp_path)
    options = PrepareOptions(
        **{**first.meta["options"], "out": first.path, "inputs": tuple(first.meta["options"]["inputs"])}
    )
    assert prepare(options).up_to_date
    chat_tokenizer(tmp_path / "tokenizer", MARKED)
    with pytest.raises(DataError, match="already holds a token store made from different input"):
        prepare(options)
    again = prepare(replace(options, overwrite=True))
    assert not again.up_to_date and "markers" in again.store.report["notes"][0]


@pytest.mark.parametrize("damage", ["flip", "short", "gone"])
def test_a_damaged_mask_is_found(tmp_path: Path, damage: str) -> None:
    store = chat_store_in(tmp_path)
    file = store.path / "train.targets"
    content = bytearray(file.read_bytes())
    content[40] ^= 1
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(content if damage == "flip" else content[:-8])
    with pytest.raises(DataError, match=r"train\.targets"):
        verify(TokenStore.open(store.path))


def test_conversations_that_cannot_be_used(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path / "tokenizer")
    file = tmp_path / "chats.jsonl"
    options = PrepareOptions(out=tmp_path / "store", inputs=(str(file),), tokenizer=str(tokenizer), chat=True)
    file.write_text(json.dumps({"messages": conversation(1)}) + "\n" + '{"text": "x"}\n')
    with pytest.raises(DataError, match=r"only one conversation .*1 skipped: 1 without 'messages'"):
        prepare(options)
    file.write_text('{"text": "x"}\n')
    with pytest.raises(DataError, match="no conversation can be used"):
        prepare(options)
    with pytest.raises(DataError, match="--tokenizer train:4096: with --chat, pass a folder"):
        prepare(replace(options, tokenizer="train:4096"))
    with pytest.raises(DataError, match="--chat .* combined with --heldout-from and --max-tokens"):
        prepare(replace(options, heldout_from=("more.jsonl",), max_tokens=100))


def test_folders_and_datasets_of_conversations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same conversations make the same store, whether they are one file, files in a folder, or rows of a dataset."""
    datasets = pytest.importorskip("datasets")
    store = chat_store_in(tmp_path, count=COUNT)
    folder = tmp_path / "folder"
    (folder / "more").mkdir(parents=True)
    write_conversations(folder / "more" / "b.jsonl", COUNT)
    (folder / "README.md").write_text("not conversations")
    (folder / ".hidden.jsonl").write_text("not read")
    options = PrepareOptions(
        out=tmp_path / "of-folder", inputs=(str(folder),), tokenizer=str(tmp_path / "tokenizer"), heldout=0.2, chat=True
    )
    found = prepare(options).store
    assert sorted(texts(found, "train") + texts(found, "heldout")) == sorted(
        texts(store, "train") + texts(store, "heldout")
    )
    real, calls = datasets.load_dataset, []

    def load(name: str, config: str | None, **how: object) -> object:
        calls.append((name, config, how))
        file = str(folder / "more" / "b.jsonl")
        return real("json", data_files=file, split="train", streaming=True, cache_dir=str(tmp_path / "cache"))

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(hub, "commit_of", lambda dataset, revision: f"commit of {revision}")
    asked = replace(options, inputs=(), hf="someone/chats", hf_revision="v2", out=tmp_path / "of-hub")
    found = prepare(asked).store
    assert sorted(texts(found, "train") + texts(found, "heldout")) == sorted(
        texts(store, "train") + texts(store, "heldout")
    )
    assert {(name, how["revision"]) for name, _, how in calls} == {("someone/chats", "commit of v2")}
    assert "someone/chats at commit commit of v2" in found.meta["report"]["notes"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"no conversation can be used.*no input was found"):
        prepare(replace(options, inputs=(str(tmp_path / "empty"),), out=tmp_path / "of-empty"))
    with pytest.raises(DataError, match="--chat: no input given"):
        prepare(replace(options, inputs=()))
    with pytest.raises(DataError, match="--hf-revision v2 has no effect without --hf"):
        prepare(replace(options, hf_revision="v2"))
