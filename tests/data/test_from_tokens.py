"""`boost prepare --from-tokens`: the store holds the ids and documents of files written by hand; what is wrong is an error."""

import struct
from itertools import chain, pairwise

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from boost.data import from_tokens
from boost.data.from_tokens import TokenInput, byte_counter, open_token_files, prepare_tokens
from boost.data.options import Progress, TokenOptions
from boost.data.report import PrepareReport
from boost.data.tokenizer import tokenizer_fingerprint, train_tokenizer
from boost.data.verify import verify
from boost.errors import DataError

MEGATRON_CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}


def write_megatron(prefix, documents, dtype="uint16"):
    """PREFIX.bin and PREFIX.idx of documents that consist of sequences of ids; returns the path of the index."""
    sequences = [sequence for document in documents for sequence in document]
    item = np.dtype(dtype).itemsize
    offsets, boundaries = [0], [0]
    for sequence in sequences:
        offsets.append(offsets[-1] + len(sequence) * item)
    for document in documents:
        boundaries.append(boundaries[-1] + len(document))
    index = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", MEGATRON_CODES[dtype])
    index += struct.pack("<QQ", len(sequences), len(boundaries))
    index += struct.pack(f"<{len(sequences)}i", *map(len, sequences))
    index += struct.pack(f"<{len(sequences)}q", *offsets[:-1])
    index += struct.pack(f"<{len(boundaries)}q", *boundaries)
    letter = np.dtype(dtype).char
    data = b"".join(struct.pack(f"<{len(s)}{letter if item < 8 else 'q'}", *s) for s in sequences)
    prefix.with_name(f"{prefix.name}.bin").write_bytes(data)
    path = prefix.with_name(f"{prefix.name}.idx")
    path.write_bytes(index)
    return path


TEXTS = [f"Document {i} says: \N{SNOWMAN} é, {i * 7} lines\n" for i in range(60)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A tokenizer whose eos has id 0, and its file."""
    trained = train_tokenizer(TEXTS, 300)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    trained.save(str(path))
    return trained, str(path)


def write_llmc(path, documents, magic=20240520, version=1, dtype="<u2"):
    """A file of llm.c: each document begins with eos, whose id is 0."""
    data = np.array([id for document in documents for id in (0, *document)], dtype)
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(data)
    path.write_bytes(header.tobytes() + data.tobytes())


@pytest.fixture
def ids(tokenizer):
    return [tokenizer[0].encode(text).ids for text in TEXTS]


def options(tmp_path, made, path, **changes):
    given = {"out": tmp_path / "store", "from_tokens": str(path), "tokenizer": made[1], "heldout": 0.1, **changes}
    return TokenOptions(**given)


def documents(split):
    """The ids of each document without its eos."""
    ends = split.documents
    whole = [split.window(int(a), int(b - a)).tolist() for a, b in pairwise(ends)]
    assert all(document[-1] == split.eos for document in whole)
    return [document[:-1] for document in whole]


def check(store, ids):
    """That the store holds these documents and the bytes of their text."""
    verify(store)
    train, heldout = store.split("train"), store.split("heldout")
    found = documents(train) + documents(heldout)
    assert sorted(found) == sorted(ids) and 0 < heldout.n_documents < train.n_documents
    texts = [store.tokenizer().decode(document) for document in found]
    assert train.n_bytes + heldout.n_bytes == sum(len(text.encode()) for text in texts)
    (source,) = store.report["sources"]
    assert source["documents"] == len(ids) and source["bytes"] == train.n_bytes + heldout.n_bytes
    assert source["tokens"] == train.n_tokens + heldout.n_tokens == sum(map(len, ids)) + len(ids)


@pytest.mark.parametrize("with_eos", [False, True])
def test_megatron(with_eos, tmp_path, tokenizer, ids):
    sequences = [[each[:3], each[3:] + [0] * with_eos] for each in ids]
    index = write_megatron(tmp_path / "x", sequences, "int32")
    result = prepare_tokens(options(tmp_path, tokenizer, index))
    check(result.store, ids)
    assert (result.store.fingerprint, result.store.eos) == (tokenizer_fingerprint(tokenizer[0]), 0)
    assert result.store.split("train").tokens.dtype == np.dtype("<u2")
    again = prepare_tokens(options(tmp_path, tokenizer, index))
    assert again.up_to_date and not result.up_to_date
    index.write_bytes(index.read_bytes())
    with pytest.raises(DataError, match="add --overwrite to replace it"):
        prepare_tokens(options(tmp_path, tokenizer, index))


def test_held_out_ids_of_their_own_stay_held_out(tmp_path, tokenizer, ids):
    """Those of a folder of nanoGPT, and those that an option names."""
    folder = tmp_path / "nano"
    folder.mkdir()
    for name, some in {"train": ids[:50], "val": ids[50:]}.items():
        np.array([token for each in some for token in (*each, 0)], "<u2").tofile(folder / f"{name}.bin")
    index = write_megatron(tmp_path / "train_document", [[each] for each in ids[:50]])
    held = write_megatron(tmp_path / "valid_document", [[each] for each in ids[50:]])
    for path, changes in ((folder, {}), (index, {"heldout_from": (str(held),)})):
        store = prepare_tokens(options(tmp_path, tokenizer, path, out=tmp_path / f"of {path.name}", **changes)).store
        check(store, ids)
        assert documents(store.split("train")) == ids[:50] and documents(store.split("heldout")) == ids[50:]
    (folder / "val.bin").unlink()
    assert [file.split for file in open_token_files(folder, "uint16")] == [None]


@pytest.mark.parametrize("bad", [300, -1])
def test_ids_outside_the_vocabulary_are_found(bad, tmp_path, tokenizer, ids):
    index = write_megatron(tmp_path / "x", [[each] for each in [*ids, [5, bad]]], "int32")
    number = sum(map(len, ids)) + 1
    message = rf"x\.bin: id {bad} \(at index {number} in the file\) is outside the tokenizer's vocabulary of 300 tokens"
    with pytest.raises(DataError, match=message):
        prepare_tokens(options(tmp_path, tokenizer, index))
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer": "train:300"}, "needs the tokenizer that produced the ids; pass it with --tokenizer"),
        ({"eos": "<nope>"}, "--eos <nope>: not a token"),
    ],
)
def test_options_that_conflict(changes, message, tmp_path, tokenizer, ids):
    index = write_megatron(tmp_path / "x", [[each] for each in ids])
    with pytest.raises(DataError, match=message):
        prepare_tokens(options(tmp_path, tokenizer, index, **changes))
    assert not (tmp_path / "store").exists()


def test_nothing_to_read_is_an_error(tmp_path, tokenizer):
    write_megatron(tmp_path / "x", [[[]], [[0]]])
    with pytest.raises(DataError, match="the input contains no token ids: 2 skipped: 2 empty"):
        prepare_tokens(options(tmp_path, tokenizer, tmp_path / "x.idx"))
    for name, ids in {"train": [5, 6, 0], "val": [0]}.items():
        np.array(ids, "<u2").tofile(tmp_path / f"{name}.bin")
    with pytest.raises(DataError, match="the heldout split contains no token ids: 1 skipped: 1 empty"):
        prepare_tokens(options(tmp_path, tokenizer, tmp_path))
    np.array([5, 0], "<u2").tofile(tmp_path / "one.bin")
    with pytest.raises(DataError, match="only one document, .* --heldout-from, or .* with --eos"):
        prepare_tokens(options(tmp_path, tokenizer, tmp_path / "one.bin"))


def test_a_vocabulary_that_is_not_read_is_named(tmp_path, tokenizer, ids):
    np.concatenate([[*each, 0] for each in ids]).astype("<u2").tofile(tmp_path / "train.bin")
    (tmp_path / "meta.pkl").write_bytes(b"")
    (note,) = prepare_tokens(options(tmp_path, tokenizer, tmp_path)).store.report["notes"]
    assert "meta.pkl is not read" in note and "--tokenizer must have the same" in note


def test_files_that_change_meanwhile_are_noticed(tmp_path, tokenizer, ids):
    index = write_megatron(tmp_path / "x", [[each] for each in ids])

    class Change(Progress):
        def phase(self, name, total):
            if name == "copying the ids":
                index.with_suffix(".bin").write_bytes(b"")

    with pytest.raises(DataError, match=r"x\.bin changed during preparation"):
        prepare_tokens(options(tmp_path, tokenizer, index), Change())
    assert not (tmp_path / "store").exists()


def test_bytes_of_special_and_added_tokens(tokenizer):
    """The table of a byte-level tokenizer against decoding."""
    changed = Tokenizer.from_file(tokenizer[1])
    changed.add_special_tokens([AddedToken("<|special|>", special=True)])
    changed.add_tokens(["an added é token"])
    count, ids = byte_counter(changed), list(range(302))
    assert count(np.array(ids)) == sum(count(np.array([i])) for i in ids)
    for text in TEXTS[:5]:
        encoded = [0, *changed.encode(text).ids, 300, 301]
        assert count(np.array(encoded)) == len(changed.decode(encoded, skip_special_tokens=True).encode())


def test_bytes_of_other_tokenizers_are_those_of_the_text(monkeypatch):
    monkeypatch.setattr(from_tokens, "_DECODED_IDS", 2)
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "snow": 1, "##man": 2, "é": 3}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    assert byte_counter(tokenizer)(np.array([1, 2, 3])) == len("snowman") + len("é".encode())


# ---- The files, in blocks of four ids

EOS = 9
DOCUMENTS = [[[1, 2, 3]], [[4], [5, EOS]], [[6, EOS, 7, 7, 7, 7, 7]], [[8, EOS]]]
"""Of sequences: one without eos, one of two sequences, one with eos inside."""


@pytest.fixture
def short_blocks(monkeypatch):
    monkeypatch.setattr(from_tokens, "_BLOCK", 4)


def documents_of(path, dtype="uint16"):
    """The ids of each document, over all files of a path."""
    found, current = [], []
    for file in open_token_files(path, dtype):
        for ids, end in file.pieces(EOS):
            current += ids.tolist()
            if end:
                found.append(current)
                current = []
    assert not current
    return found


@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize("dtype", MEGATRON_CODES)
def test_megatron_documents_are_those_of_the_index(dtype, tmp_path):
    index = write_megatron(tmp_path / "my_text_document", DOCUMENTS, dtype)
    expected = [list(chain(*document)) for document in DOCUMENTS]
    for path in (index, index.with_suffix(".bin"), index.with_suffix("")):
        assert documents_of(path) == expected


def test_megatron_empty_documents_and_modes(tmp_path):
    index = write_megatron(tmp_path / "x", [[[1]], [], [[]], [[2, 3]]])
    index.write_bytes(index.read_bytes() + bytes(3))  # one byte per sequence, of a multimodal dataset
    assert documents_of(index) == [[1], [], [], [2, 3]]


def change(at, data):
    return lambda content: content[:at] + data + content[at + len(data) :]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (change(0, b"TNTIDX"), r"x\.idx: not a Megatron-LM index"),
        (lambda content: content[:20], r"x\.idx: not a Megatron-LM index"),
        (change(9, b"\2"), "Megatron-LM index version 2 is not supported; valid version: 1"),
        (change(17, b"\7"), "id type code 7 is not supported; valid codes"),
        (lambda content: content[:-1], "99 bytes follow the header instead of 100 for 5 sequences; copy the file"),
        (change(26, b"\6"), "100 bytes follow the header instead of 108 for 5 sequences"),
        (change(34, struct.pack("<i", 4)), "sequences are not contiguous"),
        (change(34, struct.pack("<i", -1)), "sequences are not contiguous"),
        (change(34 + 60 + 8, struct.pack("<q", 5)), "document indices do not partition the 5 sequences"),
        (change(34 + 60 + 32, struct.pack("<q", 4)), "document indices do not partition the 5 sequences"),
    ],
)
def test_a_damaged_index_is_an_error_that_names_it(damage, message, tmp_path):
    index = write_megatron(tmp_path / "x", DOCUMENTS)
    index.write_bytes(damage(index.read_bytes()))
    with pytest.raises(DataError, match=message):
        open_token_files(index, "uint16")


def test_a_megatron_file_that_does_not_match_its_index(tmp_path):
    index = write_megatron(tmp_path / "x", DOCUMENTS)
    data = index.with_suffix(".bin").read_bytes()
    index.with_suffix(".bin").write_bytes(data[:-2])
    with pytest.raises(DataError, match=r"x\.bin has 28 bytes, but x\.idx expects 30"):
        open_token_files(index, "uint16")
    index.with_suffix(".bin").unlink()
    with pytest.raises(DataError, match=r"x\.bin: no such file"):
        open_token_files(index, "uint16")


@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_raw_ids_end_documents_at_eos(dtype, tmp_path):
    ids = [1, 2, 3, 4, EOS, 5, EOS, EOS, 6, 7]
    np.array(ids, dtype).tofile(tmp_path / "all.bin")
    assert documents_of(tmp_path / "all.bin", dtype=dtype) == [[1, 2, 3, 4, EOS], [5, EOS], [EOS], [6, 7]]


def test_arrays_of_other_tools_are_named(tmp_path):
    """Their headers would be read as ids."""
    ids = np.arange(64, dtype="<u2")
    path = tmp_path / "chunk-0-0.bin"
    for name in ("NumPy", "LitGPT", "torch.save or NumPy", "LitData"):
        with path.open("wb") as file:
            match name:
                case "NumPy":
                    np.save(file, ids)
                case "LitGPT":
                    file.write(b"LITPKDS" + struct.pack("<QBQ", 1, 8, 64) + ids.tobytes())
                case "torch.save or NumPy":
                    np.savez(file, ids)
                case "LitData":
                    file.write(struct.pack("<III", 1, 12, 140) + ids.tobytes())
                    (tmp_path / "index.json").write_text('{"chunks": []}')
        with pytest.raises(DataError, match=f"a file of {name}, whose header is not ids"):
            open_token_files(path, "uint16")


def test_a_dtype_that_cannot_be_right_is_an_error(tmp_path, tokenizer, ids):
    np.concatenate(ids).astype("<u4").tofile(tmp_path / "wide.bin")
    with pytest.raises(DataError, match=r"wide.bin: every second id is 0, .*pass --token-dtype uint32"):
        open_token_files(tmp_path / "wide.bin", "uint16")
    np.concatenate(ids).astype("<i8").tofile(tmp_path / "wide.bin")
    with pytest.raises(DataError, match=r"wide.bin: every second id is 0, .* write them as uint32"):
        open_token_files(tmp_path / "wide.bin", "uint32")
    np.arange(1, 50).astype("<u2").tofile(tmp_path / "narrow.bin")
    made = TokenInput(options(tmp_path, tokenizer, tmp_path / "narrow.bin"))
    with pytest.raises(DataError, match="--token-dtype uint16 cannot hold .* 70000 tokens"):
        list(made.parts(0, 70_000, PrepareReport(), Progress()))


def test_paths_without_tokens_are_one_line(tmp_path):
    (tmp_path / "x.txt").write_text("text")
    (tmp_path / "half.bin").write_bytes(bytes(7))
    for path, message in {
        tmp_path / "half.bin": "7 bytes are not a whole number of uint16 ids",
        tmp_path: r"contains no train\.bin",
        tmp_path / "x.txt": r"not token ids; pass a Megatron-LM \.bin or \.idx",
        tmp_path / "none.bin": r"none\.bin: no such file",
        tmp_path / "prefix": "prefix: no such file",
    }.items():
        with pytest.raises(DataError, match=message):
            open_token_files(path, "uint16")


@pytest.mark.parametrize(("magic", "version", "dtype"), [(20240520, 1, "<u2"), (20240801, 7, "<u4")])
def test_the_header_of_llmc_is_no_tokens(magic, version, dtype, tokenizer, ids, tmp_path):
    write_llmc(tmp_path / "train.bin", ids[:50], magic, version, dtype)
    write_llmc(tmp_path / "val.bin", ids[50:], magic, version, dtype)
    given = TokenOptions(out=tmp_path / "store", from_tokens=str(tmp_path), tokenizer=tokenizer[1])
    store = prepare_tokens(given).store
    for name, documents in (("train", ids[:50]), ("heldout", ids[50:])):
        assert store.split(name).tokens[:].tolist() == [*chain.from_iterable([*document, 0] for document in documents)]
    assert store.report["sources"][0]["skipped"]["empty"]["count"] == 2  # before the first eos of each file
    (tmp_path / "val.bin").write_bytes((tmp_path / "val.bin").read_bytes()[:-4])
    with pytest.raises(DataError, match=r"val\.bin: \d+ bytes do not hold the \d+ ids"):
        open_token_files(tmp_path, "uint16")
    write_llmc(tmp_path / "train.bin", ids, magic, 3, dtype)
    with pytest.raises(DataError, match=r"train\.bin: version 3 .* is not supported"):
        open_token_files(tmp_path, "uint16")
