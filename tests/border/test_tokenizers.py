"""Random tokenizers with random settings: our tokens are those of `AutoTokenizer` for the folder, also after import and export.

Differences that are intended: text never becomes a special token (transformers: `split_special_tokens`), and dropout is off.
"""

import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from boost.convert.vocabulary import read_vocabulary, tokenizer_files
from boost.data.tokenizer import PlainText, find_eos, load_tokenizer, parse_tokenizer
from boost.errors import DataError
from tests.border.draws import Seeds, drawn

TEXT = "The cat sat on the mat in New York; le café était là, <b>bold</b> 12 345 hello world don't stop\n\tnow"
SPELLED = ["</s>", "<s>", "[SEP]", "<x>", "New York", "é", "  ", "<|end|>", "cat"]
PARTS = [*TEXT.split(), *SPELLED, " ", "   ", "\n", "\t", "漢字", "🎉", "a", "\uff26\uff35", "a</s>b", "e\u0301", "."]
CLASSES = {
    "bytes": ("GPT2TokenizerFast", "Qwen2Tokenizer", "LlamaTokenizerFast", "RobertaTokenizerFast"),
    "metaspace": ("LlamaTokenizerFast", "GemmaTokenizerFast"),
    "unigram": ("T5TokenizerFast", "XLMRobertaTokenizerFast"),
    "wordpiece": ("BertTokenizerFast",),
    "wordlevel": (),
}


def draw_tokenizer(rng: random.Random, kind: str) -> Tokenizer:
    """A tokenizer of one kind, trained on `TEXT`, with random normalizers, added tokens and post-processor."""
    special = ["<unk>", "<s>", "</s>", "[SEP]"]
    model, trainer = {
        "bytes": (models.BPE(), trainers.BpeTrainer),
        "metaspace": (
            models.BPE(unk_token=rng.choice(("<unk>", None)), byte_fallback=rng.random() < 0.5),
            trainers.BpeTrainer,
        ),
        "unigram": (models.Unigram(), trainers.UnigramTrainer),
        "wordpiece": (models.WordPiece(unk_token="<unk>"), trainers.WordPieceTrainer),
        "wordlevel": (models.WordLevel(unk_token="<unk>"), trainers.WordLevelTrainer),
    }[kind]
    tokenizer = Tokenizer(model)
    steps = [normalizers.NFKC(), normalizers.Lowercase(), normalizers.Strip(), normalizers.Replace("cat", "dog")]
    steps = rng.sample([*steps, normalizers.NFD(), normalizers.StripAccents()], rng.choice([0, 0, 1, 2]))
    spaces = pre_tokenizers.Metaspace(prepend_scheme=rng.choice(["always", "first", "never"]))
    prefix = rng.random() < 0.5
    if kind == "bytes":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
        tokenizer.decoder = decoders.ByteLevel()
    elif kind == "metaspace" and prefix:
        steps += [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    elif kind in ("metaspace", "unigram"):
        tokenizer.pre_tokenizer, tokenizer.decoder = spaces, decoders.Metaspace()
    elif kind == "wordpiece":
        steps = [normalizers.BertNormalizer(lowercase=prefix)] if rng.random() < 0.7 else steps
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    else:
        tokenizer.pre_tokenizer = rng.choice([pre_tokenizers.Whitespace(), pre_tokenizers.WhitespaceSplit()])
    if steps:
        tokenizer.normalizer = normalizers.Sequence(steps)
    options: dict[str, Any] = {"special_tokens": special, "vocab_size": 340, "show_progress": False}
    options |= {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet()} if kind == "bytes" else {}
    options |= {"unk_token": "<unk>"} if kind == "unigram" else {}
    if getattr(model, "byte_fallback", False) and rng.random() < 0.7:
        options |= {"special_tokens": [*special, *(f"<0x{byte:02X}>" for byte in range(256))], "vocab_size": 500}
    tokenizer.train_from_iterator([TEXT, *SPELLED], trainer(**options))
    for content in rng.sample(SPELLED, rng.randrange(4)):
        token = AddedToken(content, **draw_flags(rng))
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
    ends = [(name, tokenizer.token_to_id(name)) for name in ("<s>", "</s>")]
    if (template := rng.choice(["", "", "$A", "<s> $A", "<s> $A </s>"])) and all(i is not None for _, i in ends):
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=ends)
    if rng.random() < 0.2:
        tokenizer.enable_truncation(3)
    if rng.random() < 0.2:
        tokenizer.enable_padding(length=7)
    return tokenizer


def draw_flags(rng: random.Random) -> dict[str, bool]:
    return {name: rng.random() < 0.3 for name in ("lstrip", "rstrip", "single_word", "normalized", "special")}


def draw_settings(rng: random.Random, kind: str, tokenizer: Tokenizer) -> dict[str, Any]:
    """A tokenizer_config.json that overrides the tokenizer.json."""
    names = ("PreTrainedTokenizerFast", "PreTrainedTokenizerFast", "TokenizersBackend", *CLASSES[kind])
    settings: dict[str, Any] = {"tokenizer_class": rng.choice(names)}
    named = rng.sample(["eos_token", "bos_token", "unk_token", "pad_token"], rng.randrange(4))
    settings |= {name: rng.choice(["<s>", "</s>", "<|end|>", "[SEP]"]) for name in named}
    decoder = {}
    for number, token in tokenizer.get_added_tokens_decoder().items():
        flags = {
            "special": token.special,
            **{name: getattr(token, name) for name in draw_flags(rng) if name != "special"},
        }
        decoder[str(number)] = {"content": token.content, **flags, **(draw_flags(rng) if rng.random() < 0.5 else {})}
    options: list[dict[str, Any]] = [
        {"added_tokens_decoder": decoder},
        {"add_prefix_space": rng.random() < 0.5},
        {"add_bos_token": True, "bos_token": "<s>"},
        {"do_lower_case": rng.random() < 0.5},
        {"extra_special_tokens": [rng.choice(SPELLED)]},
        {"additional_special_tokens": [rng.choice(SPELLED)]},
        {"model_max_length": 4},
    ]
    for option in rng.sample(options, rng.randrange(5)):
        settings |= option
    return settings


def write(folder: Path, rng: random.Random) -> str:
    """A folder with a random tokenizer, as people or transformers write it. Returns its kind."""
    kind = rng.choice(list(CLASSES))
    tokenizer = draw_tokenizer(rng, kind)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    if rng.random() < 0.9:
        (folder / "tokenizer_config.json").write_text(json.dumps(draw_settings(rng, kind, tokenizer)))
    if rng.random() < 0.2:
        (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": rng.choice(["</s>", "<|end|>"])}))
    return kind


def draw_text(rng: random.Random) -> str:
    return "".join(rng.choice(PARTS) + rng.choice(["", " ", " "]) for _ in range(rng.randrange(12)))


def check(folder: Path, seed: int) -> str:
    """Compares one random tokenizer. Returns what came out."""
    transformers = pytest.importorskip("transformers")
    rng = random.Random(seed)
    kind, texts = write(folder, rng), [draw_text(rng) for _ in range(6)]
    try:
        theirs = transformers.AutoTokenizer.from_pretrained(folder, split_special_tokens=True)
    except Exception:
        with pytest.raises(DataError):
            load_tokenizer(folder)
        return "refused by both"
    ours = load_tokenizer(folder)
    stored = parse_tokenizer(ours.to_str())
    plain = PlainText(ours)
    added = ours.get_added_tokens_decoder()
    assert theirs.eos_token not in ours.get_vocab() or find_eos(ours, spec=folder)[0] == theirs.eos_token, (seed, kind)
    special = {number for number, token in added.items() if token.special} - {plain.unknown}
    for text in texts:
        try:
            copy = Tokenizer.from_str(theirs.backend_tokenizer.to_str())
            copy.encode_special_tokens = True
            copy.no_truncation()
            copy.no_padding()
            saved = copy.encode(text, add_special_tokens=False).ids
            expected = theirs(text, add_special_tokens=False, truncation=False, padding=False)["input_ids"]
        except BaseException:  # a vocabulary without an unknown token, and settings with which the library panics
            return "cannot encode"
        if saved != expected:
            return "saved differently"  # with changed flags of a token, the library saves another tokenizer than it has in memory
        for tokenizer in (ours, stored):
            assert tokenizer.encode(text, add_special_tokens=False).ids == expected, (seed, kind, text)
        forged = plain.counts["forged"]
        dropped = plain.counts["dropped"]
        ids = plain.ids(expected, text)
        assert plain.counts["dropped"] == dropped or kind == "metaspace", (seed, kind, text)
        assert plain.counts["forged"] > forged or special.isdisjoint(ids), (seed, kind, text)
        assert not special.isdisjoint(expected) or ids == expected, (seed, kind, text)
    try:
        vocabulary = read_vocabulary(folder)
    except DataError as problem:
        return "refused" if re.search("supports at most one|adds token", str(problem)) else f"seed {seed}: {problem}"
    exported = folder / "exported"
    exported.mkdir()
    text, settings = tokenizer_files(vocabulary.json, vocabulary.eos, None, vocabulary.start, 128, vocabulary.hub)
    (exported / "tokenizer.json").write_text(text)
    (exported / "tokenizer_config.json").write_text(json.dumps(settings))
    again = transformers.AutoTokenizer.from_pretrained(exported)
    if any(again.convert_tokens_to_ids(token) not in special for token in again.all_special_tokens):
        return "equal"  # transformers always considers named tokens special, so they are not found in text
    for text in texts:
        start = [] if vocabulary.start is None else [vocabulary.start]
        ids = ours.encode(text, add_special_tokens=False).ids
        assert again(text)["input_ids"] == start + ids, (seed, kind, text)
        assert again.decode(ids, skip_special_tokens=True) == ours.decode(ids), (seed, kind, text)
    back = read_vocabulary(exported)
    assert (back.fingerprint, back.start) == (vocabulary.fingerprint, vocabulary.start), (seed, kind)
    return "equal"


@pytest.mark.slow
@drawn(40, 2000)
def test_tokens_are_those_of_transformers(seeds: Seeds, tmp_path: Path) -> None:
    results = Counter(check(tmp_path / str(seed), seed) for seed in seeds())
    assert results.keys() <= {"equal", "refused", "refused by both", "cannot encode", "saved differently"}
    assert results["equal"] > 0.8 * results.total(), results
