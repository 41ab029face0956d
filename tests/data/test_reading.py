"""Preparation that is killed, or whose stream breaks, continues: the store is that of an undisturbed run, byte for byte."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from boost.data import encode, hub, prepare, writer
from boost.data.prepare import PrepareOptions, Progress
from boost.data.store import TokenStore
from boost.data.verify import verify
from boost.data.writer import RESUME_FILE, sibling
from boost.errors import DataError, StorageError
from tests.data.inputs import content, flip, texts_of
from tests.data.kills import killed_at
from tests.data.web import Breaks, c4_texts, serve, write_c4

Options = Callable[..., PrepareOptions]


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many batches, and a commit after each."""
    monkeypatch.setattr(encode, "BATCH_CHARS", 1500)
    monkeypatch.setattr(prepare, "COMMIT_S", 0.0)
    monkeypatch.setattr(prepare, "COMMIT_PAUSE", 0.0)


@pytest.fixture
def c4(tmp_path: Path) -> Path:
    return write_c4(tmp_path / "en")


def options(c4: Path, **changes: Any) -> PrepareOptions:
    """Of the train files of `c4`, with the validation files held out."""
    given = {
        "out": c4.parent / "store",
        "inputs": tuple(sorted(map(str, c4.glob("*train*")))),
        "heldout_from": tuple(sorted(map(str, c4.glob("*validation*")))),
        "tokenizer": "train:300",
    }
    return PrepareOptions(**{**given, **changes})


def undisturbed(asked: PrepareOptions) -> dict[str, bytes]:
    store = prepare.prepare(asked).store.path
    found = content(store)
    shutil.rmtree(store)
    return found


class Stop(BaseException):
    """Like KeyboardInterrupt, but from nowhere else."""


class StopAt(Progress):
    """Interrupts the encoding after so many of its documents."""

    def __init__(self, documents: int) -> None:
        self.left, self.encodes, self.phases = documents, False, list[str]()

    def phase(self, name: str, total: int | None) -> None:
        self.phases.append(name)
        self.encodes = name.startswith("encoding")

    def update(self, consumed: int, documents: int) -> None:
        self.left -= self.encodes
        if self.left < 0:
            raise Stop


def test_held_out_text_has_its_own_source(c4: Path) -> None:
    store = prepare.prepare(options(c4)).store
    assert texts_of(store, "heldout") == c4_texts("validation", 0, 40)
    assert texts_of(store, "train") == [text for shard in range(3) for text in c4_texts("train", shard, 40)]
    both = prepare.prepare(options(c4, inputs=(str(c4),), out=c4.parent / "folder")).store
    assert both.content("train") == store.content("train")
    (skipped,) = [each["skipped"] for each in both.report["sources"] if each["name"] == str(c4)]
    assert list(skipped) == ["in the split 'validation', not in train"]


def test_limits_of_tokens(c4: Path, tmp_path: Path) -> None:
    whole = prepare.prepare(options(c4)).store
    limits = {"max_tokens": 1000, "max_heldout_tokens": 400}
    part = prepare.prepare(options(c4, out=tmp_path / "part", tokenizer=str(whole.path), **limits)).store
    for name, limit in (("train", 1000), ("heldout", 400)):
        split, of_whole = part.split(name), whole.split(name)
        assert split.n_tokens >= limit > int(split.documents[-2])
        assert split.tokens[:].tolist() == of_whole.tokens[: split.n_tokens].tolist()
    totals = [sum(each[key] for each in part.report["sources"]) for key in ("documents", "tokens", "bytes")]
    splits = [part.split(name) for name in ("train", "heldout")]
    assert totals == [sum(getattr(s, key) for s in splits) for key in ("n_documents", "n_tokens", "n_bytes")]
    (note,) = part.report["notes"]
    assert note.endswith("document that reached 1000 training tokens (--max-tokens)")
    short = prepare.prepare(options(c4, out=tmp_path / "short", max_tokens=10**9)).store
    assert "fewer than 1000000000 training tokens (--max-tokens)" in short.report["notes"][-1]


def test_a_limit_works_without_a_separate_split(c4: Path) -> None:
    store = prepare.prepare(options(c4, heldout_from=(), heldout=0.1, max_tokens=1000)).store
    assert 1000 <= store.split("train").n_tokens < 1200 and store.split("heldout").n_documents > 0
    with pytest.raises(DataError, match="held-out text is empty: .*; raise --max-tokens"):
        prepare.prepare(options(c4, out=c4.parent / "b", heldout_from=(), heldout=0.005, max_tokens=1))


LIMITED = {"max_tokens": 2500, "max_heldout_tokens": 500}
STOPS = ((1,), (25,), (41,), (60, 30), (100, 1, 1, 30))


@pytest.mark.parametrize(
    ("limits", "all_stops"),
    [({}, STOPS), (LIMITED, ((1,), (20,), (30,), (20, 15))), ({"max_documents": 70}, STOPS)],
    ids=["all", "tokens", "documents"],
)
def test_an_interrupted_preparation_continues(
    c4: Path, limits: dict[str, int], all_stops: tuple[tuple[int, ...], ...]
) -> None:
    (c4 / "c4-train.00001-of-00003.json.gz").unlink()
    (c4 / "rows.jsonl").write_text('{"text": "a row"}\n{"other": 1}\n\n{"text": "the last row"}\n')
    (c4 / "notes.txt").write_text("the notes of the corpus\n" * 300)
    asked = options(c4, **limits)
    asked = PrepareOptions(**{**vars(asked), "inputs": (*asked.inputs, str(c4 / "notes.txt"), str(c4 / "rows.jsonl"))})
    expected = undisturbed(asked)
    for stops in all_stops:
        for documents in stops:
            with pytest.raises(Stop):
                prepare.prepare(asked, progress := StopAt(documents))
        assert not asked.out.exists()
        store = prepare.prepare(asked, progress := StopAt(10**6)).store
        assert progress.phases == (["encoding, continued"] if stops != (1,) else progress.phases)
        assert content(store.path) == expected
        assert not sibling(asked.out, "tmp").exists()
        shutil.rmtree(store.path)


def test_a_partial_store_of_other_options_is_kept(c4: Path) -> None:
    with pytest.raises(Stop):
        prepare.prepare(options(c4), StopAt(60))
    other = options(c4, tokenizer="train:290")
    with pytest.raises(DataError, match=r"an interrupted .* wrote .* tokens; repeat its command"):
        prepare.prepare(other)
    assert prepare.prepare(options(c4), progress := StopAt(10**6)) and progress.phases == ["encoding, continued"]
    shutil.rmtree(other.out)
    with pytest.raises(Stop):
        prepare.prepare(options(c4), StopAt(60))
    replaced = prepare.prepare(PrepareOptions(**{**vars(other), "overwrite": True})).store
    assert replaced.vocab_size == 290 and not sibling(other.out, "tmp").exists()


def test_damage_to_a_partial_store_is_noticed(c4: Path) -> None:
    with pytest.raises(Stop):
        prepare.prepare(options(c4), StopAt(60))
    file = sibling(options(c4).out, "tmp") / "train.tokens"
    flip(file, 10 * 8)
    with pytest.raises(DataError, match=r"train\.tokens: the file was damaged after writing"):
        prepare.prepare(options(c4))
    assert prepare.prepare(options(c4)).store


def test_a_full_disk_keeps_what_is_committed(c4: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = undisturbed(options(c4))
    real, left = writer.write_all, [20]

    def write(file: Any, data: bytes) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        real(file, data)

    monkeypatch.setattr(writer, "write_all", write)
    with pytest.raises(StorageError, match="finished work is kept in .*boost-tmp, so a rerun"):
        prepare.prepare(options(c4))
    left[0] = 10**6
    assert content(prepare.prepare(options(c4)).store.path) == expected


@pytest.mark.slow
def test_a_kill_at_any_file_event_costs_at_most_a_batch(c4: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    asked = options(c4, max_tokens=3000, tokenizer=str(prepare.prepare(options(c4, out=c4.parent / "t")).store.path))
    expected = undisturbed(asked)
    kills, event = 0, 0
    while killed_at(event, lambda: prepare.prepare(asked)):
        kills, event = kills + 1, event + 3
        if asked.out.exists():  # published, killed before the leftovers were removed
            verify(TokenStore.open(asked.out))
    prepare.prepare(asked)
    assert kills > 10
    found = content(asked.out)
    found.pop(RESUME_FILE, None)
    assert found == expected


@pytest.fixture
def web_hub(c4: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, datasets: Any) -> Any:
    """The real streaming of `datasets` from a web server on loopback, where the name would be looked up on the hub."""
    breaks = Breaks("train.00001", "train.00002")
    real = datasets.load_dataset
    monkeypatch.setattr(datasets.config, "STREAMING_READ_MAX_RETRIES", 1)
    monkeypatch.setattr(datasets.config, "STREAMING_OPEN_MAX_RETRIES", 1)
    monkeypatch.setattr(datasets.config, "STREAMING_READ_RETRY_INTERVAL", 0)
    with serve(c4, breaks) as address:

        def load(name: str, config: str | None, split: str, streaming: bool, revision: str) -> Any:
            files = [f"{address}/{path.name}" for path in sorted(c4.glob(f"*{split}*"))]
            return real("json", data_files=files, split="train", streaming=streaming, cache_dir=str(tmp_path / "cache"))

        monkeypatch.setattr(datasets, "load_dataset", load)
        monkeypatch.setattr(hub, "commit_of", lambda dataset, revision: "c4")
        yield breaks


def hub_options(c4: Path, **changes: Any) -> PrepareOptions:
    source = {"inputs": (), "heldout_from": (), "hf": "allenai/c4:en", "heldout_split": "validation"}
    return options(c4, **{**source, **changes})


@pytest.mark.slow
def test_a_stream_that_breaks_continues(web_hub: Breaks, c4: Path) -> None:
    asked = hub_options(c4, max_tokens=6000)
    expected = undisturbed(asked)
    store = prepare.prepare(options(c4, out=c4.parent / "files", max_tokens=6000)).store
    for split in ("train", "heldout"):
        assert expected[f"{split}.tokens"] == (store.path / f"{split}.tokens").read_bytes()
    for documents in (20, 30, 15):  # in the held-out split, and then in the training text
        with pytest.raises(Stop):
            prepare.prepare(asked, StopAt(documents))
    assert content(prepare.prepare(asked).store.path) == expected
    shutil.rmtree(asked.out)
    web_hub.times = 3
    assert content(prepare.prepare(asked).store.path) == expected
    assert web_hub.broken == 6


@pytest.mark.slow
def test_a_stream_that_is_given_up_can_be_continued(web_hub: Breaks, c4: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "READ_RETRIES", 1)
    asked = hub_options(c4)
    expected = undisturbed(asked)
    errors: list[str] = []
    web_hub.times = 6
    for _ in range(30):
        try:
            store = prepare.prepare(asked).store
            break
        except hub.StreamError as error:
            errors.append(str(error))
    assert errors and "run the command again when the network is back" in errors[0]
    assert content(store.path) == expected
