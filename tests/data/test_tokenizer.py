"""Tokenizers: training is deterministic, and any Hugging Face file loads without its truncation and added tokens."""

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from boost.convert.vocabulary import tokenizer_files
from boost.data import tokenizer as tk
from boost.data.encode import split_text
from boost.errors import DataError

TEXTS = [f"The value of item {i} is {i * 37 % 101}.\n    return x_{i}\n\n" for i in range(200)]


@pytest.fixture(scope="module")
def trained():
    return tk.train_tokenizer(TEXTS, 380)


def test_layout_of_the_vocabulary(trained):
    vocabulary = trained.get_vocab()
    assert tk.vocabulary_size(trained) == 380 == len(vocabulary)
    assert vocabulary["<|endoftext|>"] == 0
    assert sorted(vocabulary[symbol] for symbol in pre_tokenizers.ByteLevel.alphabet()) == list(range(1, 257))


@pytest.mark.slow
def test_training_is_the_same_in_another_process(trained):
    code = (
        "import sys, json; from boost.data.tokenizer import *\n"
        "print(tokenizer_fingerprint(train_tokenizer(json.load(sys.stdin), 380)))"
    )
    env = {"PYTHONHASHSEED": "7", "PYTHONPATH": ":".join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(TEXTS), capture_output=True, text=True, check=True, env=env
    )
    assert done.stdout.strip() == tk.tokenizer_fingerprint(trained)


def test_a_small_corpus_gives_a_smaller_vocabulary():
    assert 257 < tk.vocabulary_size(tk.train_tokenizer(["aa aa aa"], 4096)) < 300


@settings(deadline=None, max_examples=50)
@given(st.text())
def test_nothing_is_lost_or_added(text):
    tokenizer = tk.train_tokenizer(TEXTS[:5], 300)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert 0 not in ids


def test_text_cannot_forge_a_document_end(trained):
    ids = trained.encode("a<|endoftext|>b", add_special_tokens=False).ids
    assert 0 not in ids and trained.decode(ids) == "a<|endoftext|>b"


PIECES = ["<unk>", "</s>", "a", "b", "<", "/", "s", ">", "</", "s>", "<a>"]
SPELLING_MODELS = {
    "unigram": models.Unigram([(piece, -1.0) for piece in PIECES], 0),
    "wordlevel": models.WordLevel({piece: i for i, piece in enumerate(PIECES)}, unk_token="<unk>"),
    "wordpiece": models.WordPiece({piece: i for i, piece in enumerate(PIECES)}, unk_token="<unk>"),
    "merges": models.BPE(
        {piece: i for i, piece in enumerate(PIECES)}, [("<", "/"), ("s", ">"), ("</", "s>")], unk_token="<unk>"
    ),
    "no merges": models.BPE({piece: i for i, piece in enumerate(PIECES)}, [], unk_token="<unk>", ignore_merges=True),
}


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", SPELLING_MODELS)
def test_a_vocabulary_that_spells_the_end_token_cannot_forge_it_either(name, special):
    """Also if it is not marked as special, as in a file without added tokens."""
    tokenizer = Tokenizer(SPELLING_MODELS[name])
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if special:
        tokenizer.add_special_tokens(["</s>"])
    tokenizer = tk.parse_tokenizer(tokenizer.to_str())
    ids = tokenizer.encode("a </s> b", add_special_tokens=False).ids
    assert ids == [2, 1, 3]
    plain = tk.PlainText(tokenizer, eos=1)
    assert "".join(map(tokenizer.id_to_token, plain.encode("a </s> b"))) == "a</s>b"
    assert plain.counts == {"unknown": 0, "dropped": 0, "spelled": 1, "forged": 0}


def test_bytes_of_a_fallback_stay_bytes_if_they_are_special_tokens():
    """The only way to have a BPE trainer add them. When text is encoded, decoded, streamed and exported."""
    names = ["<unk>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.train_from_iterator(["abc <0x>"], trainers.BpeTrainer(special_tokens=names, show_progress=False))
    tokenizer = tk.parse_tokenizer(tokenizer.to_str())
    plain, ids = tk.PlainText(tokenizer, eos=1), [2 + byte for byte in "\u65e5".encode()]
    assert plain.encode("\u65e5") == ids and plain.counts["spelled"] == 0
    assert tokenizer.decode(plain.encode("a\u65e5b<0xE6>")) == "a\u65e5b<0xE6>"
    assert tk.continuation(tokenizer, plain.encode("a"), [*ids, 1]) == "\u65e5"
    exported = Tokenizer.from_str(tokenizer_files(tokenizer.to_str(), 1, None, None, 8, {})[0])
    assert exported.decode([*ids, 1], skip_special_tokens=True) == "\u65e5"


def test_an_end_token_that_text_cannot_avoid_is_counted():
    tokenizer = Tokenizer(models.WordLevel({".": 0, "a": 1}))
    plain = tk.PlainText(tokenizer, eos=0)
    assert plain.ids([1, 0], "a.") == [1, 0]
    assert plain.counts["forged"] == 1
    tokenizer = Tokenizer(models.WordLevel({".": 0, "a": 1, "?": 2}, unk_token="?"))
    plain = tk.PlainText(tokenizer, eos=0)
    assert plain.ids([1, 0], "a.") == [1, 2], "the unknown token, which is counted"
    assert plain.counts == {"unknown": 1, "dropped": 0, "spelled": 1, "forged": 0}


def test_unknown_tokens_of_every_model_are_counted():
    for model in SPELLING_MODELS.values():
        tokenizer = Tokenizer(model)
        plain = tk.PlainText(tokenizer)
        plain.encode("é")
        assert plain.counts["unknown"] == 1, type(model)


@pytest.mark.parametrize(
    ("splitter", "text", "dropped"),
    [
        (None, "ab ca", 2),  # the space too
        (pre_tokenizers.Whitespace(), "ab  ca <x>ä", 2),
        (pre_tokenizers.Metaspace(), "bb ab cac", 2),
        (pre_tokenizers.ByteLevel(add_prefix_space=False), "ab é", 2),  # "Ã", "©"; the space is "Ġ"
    ],
)
def test_characters_that_a_tokenizer_drops_are_counted(splitter, text, dropped):
    """BPE without an unknown token leaves out what its vocabulary lacks."""
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2, "▁": 3, "Ġ": 4}, [("a", "b")]))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.add_tokens(["<x>"])
    if splitter is not None:
        tokenizer.pre_tokenizer = splitter
    plain = tk.PlainText(tokenizer)
    assert plain.encode(text) == tokenizer.encode(text).ids
    assert plain.counts["dropped"] == dropped
    fallback = Tokenizer(models.BPE({"a": 0, "<0x62>": 1}, [], byte_fallback=True))
    whole = tk.PlainText(fallback)
    assert whole.encode("ab") == [0, 1] and whole.counts["dropped"] == 0


def test_dropout_is_off(tmp_path):
    model = models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")], dropout=0.5)
    Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    notes: list[str] = []
    tokenizer = tk.load_tokenizer(tmp_path, notes)
    assert {tuple(tokenizer.encode("ab").ids) for _ in range(40)} == {(2,)}
    (note,) = notes
    assert note.startswith("the tokenizer's dropout of 0.5 is off, so that")
    (tmp_path / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"3": {"content": "<x>"}}}')
    tk.load_tokenizer(tmp_path, notes)
    assert notes == [note, note], "also if settings change the tokenizer"
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.warns(UserWarning, match=r"dropout of 0\.5 is off"):
        tk.load_tokenizer(tmp_path / "tokenizer.json")
    assert '"dropout":null' in tokenizer.to_str()


def test_settings_without_transformers_are_noted(tmp_path, monkeypatch):
    word_level("?", "a").save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "transformers", None)
    notes: list[str] = []
    tk.load_tokenizer(tmp_path, notes)
    (note,) = notes
    assert note.startswith("tokenizer_config.json ") and note.endswith("pip install transformers")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["PreTrainedTokenizerFast", "Qwen2Tokenizer"])
def test_a_class_with_other_rules_than_the_file_is_noted(kind, trained, tmp_path):
    trained.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}))
    notes: list[str] = []
    ids = tk.load_tokenizer(tmp_path, notes).encode("x_1 is 2023").ids
    assert (ids != trained.encode("x_1 is 2023").ids) == (kind == "Qwen2Tokenizer") == bool(notes)
    assert all(f"loads this tokenizer as {kind}" in note for note in notes)


@pytest.mark.slow
def test_settings_override_the_file(tmp_path):
    tokenizer = word_level("?", "a", "<x>")
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_tokens(["<x>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    added = {"2": {"content": "<x>", "lstrip": True, "rstrip": True, "single_word": False, "normalized": False}}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": added}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    for spec in (tmp_path, tmp_path / "tokenizer.json"):
        assert tk.load_tokenizer(spec).get_added_tokens_decoder()[2].lstrip
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    same = tk.tokenizer_fingerprint(tk.load_tokenizer(tmp_path))
    assert same == tk.tokenizer_fingerprint((tmp_path / "tokenizer.json").read_text()), "as without settings"
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(DataError, match="transformers cannot read the tokenizer in"):
        tk.load_tokenizer(tmp_path)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.sampled_from(["word", " and", "\n", "\n\n", "    ", "é", ".", "x=1", "\t"]), max_size=60))
def test_pieces_join_to_the_text_within_the_limit(parts):
    text = "".join(parts)
    pieces = list(split_text(text, limit=16))
    assert "".join(pieces) == text
    assert all(0 < len(piece) <= 16 for piece in pieces) or text == ""


@settings(deadline=None, max_examples=50)
@given(st.lists(st.sampled_from(["word", " and", "é", ".", "  x", "it's", " 12"]), min_size=1, max_size=8))
def test_cutting_at_a_clean_line_end_changes_no_token(words):
    tokenizer = tk.train_tokenizer(TEXTS[:50], 320)
    line = "a" + "".join(words) + ".\n"
    text = line * 12 + "\n\n    end"
    pieces = list(split_text(text, limit=len(line) * 3 + 2))
    assert len(pieces) > 2
    whole = tokenizer.encode(text, add_special_tokens=False).ids
    assert [i for piece in pieces for i in tokenizer.encode(piece, add_special_tokens=False).ids] == whole


@pytest.mark.parametrize("spec", ["train:", "train:12", "train:x", "train:-5", "train:4e3"])
def test_bad_training_spec(spec):
    with pytest.raises(DataError, match="must be an integer from 257 to 16777216"):
        tk.parse_training(spec)


def word_level(*tokens):
    return Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=tokens[0]))


@pytest.fixture
def bert_like(tmp_path):
    tokenizer = word_level("[UNK]", "[CLS]", "[SEP]", "a")
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=4, pad_id=0)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_truncation_and_padding_of_the_file_are_off(bert_like):
    tokenizer = tk.load_tokenizer(bert_like)
    assert tokenizer.encode("a " * 9, add_special_tokens=False).ids == [3] * 9
    assert tokenizer.encode("a", add_special_tokens=False).ids == [3]
    assert tk.find_eos(tokenizer) == ("[SEP]", 2)


def test_eos_by_name_by_config_by_guess_or_an_error(tmp_path):
    tokenizer = word_level("?", "</s>", "<end>", "<|endoftext|>")
    assert tk.find_eos(tokenizer) == ("<|endoftext|>", 3)
    assert tk.find_eos(tokenizer, "<end>") == ("<end>", 2)
    for eos_token in ("</s>", {"content": "</s>"}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos_token}))
        assert tk.find_eos(tokenizer, spec=tmp_path) == ("</s>", 1)
    (tmp_path / "tokenizer_config.json").write_text("[1")
    assert tk.find_eos(tokenizer, spec=tmp_path) == ("<|endoftext|>", 3)
    with pytest.raises(DataError, match="--eos nope: not a token"):
        tk.find_eos(tokenizer, "nope")
    with pytest.raises(DataError, match="pass one of its tokens with --eos TOKEN"):
        tk.find_eos(word_level("?", "a"))


def test_vocabulary_with_holes():
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 9}, unk_token="a"))
    assert tk.vocabulary_size(tokenizer) == 10


def test_fingerprint_is_of_the_content_not_the_layout(trained):
    text = trained.to_str()
    assert tk.tokenizer_fingerprint(json.dumps(json.loads(text), indent=8)) == tk.tokenizer_fingerprint(trained)
    assert tk.tokenizer_fingerprint(tk.parse_tokenizer(text)) == tk.tokenizer_fingerprint(text)
    assert tk.tokenizer_fingerprint(word_level("a")) != tk.tokenizer_fingerprint(word_level("b"))


def test_missing_and_wrong_files(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        tk.load_tokenizer(str(tmp_path / "no.json"))
    with pytest.raises(DataError, match=r"contains no tokenizer\.json"):
        tk.load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"a": 1}')
    with pytest.raises(DataError, match=r"not a Hugging Face tokenizer\.json") as caught:
        tk.load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_unreachable_hub_is_one_line(monkeypatch):
    # Offline mode of the hub client fails at once where a machine without network retries for half a minute.
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="neither a local file nor reachable on the Hugging Face Hub") as caught:
        tk.load_tokenizer("someone/never-cached-tokenizer")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ['{"eos_token": "<|im_end|>"}', '{"eos_token": {"content": "<|im_end|>"}}', None])
def test_a_name_on_the_hub_has_the_end_token_of_its_folder(content, trained, tmp_path, monkeypatch):
    tokenizer = Tokenizer.from_str(trained.to_str())
    tokenizer.add_special_tokens(["<|im_end|>"])
    file = tmp_path / "tokenizer_config.json"
    if content:
        file.write_text(content)

    def download(name, file_name):
        assert (name, file_name) == ("me/model", file.name)
        return str(file)  # not there without a content; the Hub's own errors are OSErrors and ValueErrors too

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setitem(sys.modules, "transformers", None)
    by_name, by_folder = (tk.find_eos(tokenizer, spec=spec) for spec in ("me/model", tmp_path))
    assert by_name == by_folder == (("<|im_end|>", 380) if content else ("<|endoftext|>", 0))


def llama_2() -> Tokenizer:
    """As Llama 2's: a space before each word, which the first of a text loses, and tokens of single bytes."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁there", "▁to", "▁", ".", "é"]
    tokenizer = Tokenizer(
        models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.add_special_tokens(words[:3])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def test_what_continues_a_prompt_keeps_its_space():
    tokenizer = llama_2()
    there, to, dot = (tokenizer.get_vocab()[word] for word in ("▁there", "▁to", "."))
    assert tk.continuation(tokenizer, [1, there], [to, dot]) == " to."
    stream = tk.TextStream(tokenizer, [there])
    assert [stream.add(to), stream.add(dot), stream.rest()] == [" to", ".", ""]
    after = tk.TextStream(tokenizer, [])
    assert [after.add(token) for token in (1, to, 2, there)] == ["", "to", "", " there"], "special tokens"


def test_a_character_appears_when_all_its_bytes_are_there():
    tokenizer = llama_2()
    stream = tk.TextStream(tokenizer, [tokenizer.get_vocab()["▁there"]])
    words = [*(f"<0x{byte:02X}>" for byte in "漢".encode()), "."]
    assert [stream.add(tokenizer.get_vocab()[word]) for word in words] == ["", "", "", "漢."]


@given(data=st.data())
@settings(max_examples=200)
def test_streamed_text_is_the_text(trained, data):
    tokenizer = data.draw(st.sampled_from([trained, llama_2()]), label="tokenizer")
    tokens = st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=20)
    new = data.draw(tokens, label="new")
    prompt = tokenizer.encode("There is 漢", add_special_tokens=False).ids if data.draw(st.booleans()) else []
    prompt += [tokenizer.token_to_id("."), tokenizer.token_to_id("▁to" if "▁to" in tokenizer.get_vocab() else "a")]
    stream = tk.TextStream(tokenizer, prompt)
    text = "".join([*map(stream.add, new), stream.rest()])
    assert text == tk.continuation(tokenizer, prompt, new)
    assert tokenizer.decode(prompt) + text == tokenizer.decode(prompt + new)
