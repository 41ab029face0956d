"""Tasks made from held-out text: deterministic, with the right answers, and scored by the harness for every family and layout."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks import local_tasks
from benchmarks.local_tasks import CHOICES, TASKS, WORDS, heldout_documents, make_tasks
from boost.data.store import TokenStore
from boost.errors import DataError
from boost.layouts import layouts_of
from tests import toy
from tests.cli.commands import say
from tests.convert.toys import save

NAMES = [task.name for task in TASKS]
COUNT = 20
FAMILIES: dict[str, dict[str, Any]] = {
    "dense": {"family": "dense"},
    "svd": {"family": "svd"},
    "cola": {"family": "cola", "ranks": {"kv": 4}},
    "lax": {"family": "lax", "gate": "tensor"},
}


def questions(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory, store: Path) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    assert local_tasks.main([str(store), "--out", str(folder), "--questions", str(COUNT)]) == 0
    return folder


def test_questions_are_a_function_of_text_and_seed(tasks: Path, store: Path, tmp_path: Path) -> None:
    opened = TokenStore.open(store)
    assert make_tasks(opened, tmp_path / "again", COUNT, 0) == dict.fromkeys(NAMES, COUNT)
    make_tasks(opened, tmp_path / "other", COUNT, 1)
    for name in NAMES:
        first = (tasks / f"{name}.jsonl").read_bytes()
        assert first == (tmp_path / "again" / f"{name}.jsonl").read_bytes()
        assert first != (tmp_path / "other" / f"{name}.jsonl").read_bytes()
        assert len({json.dumps(each) for each in questions(tasks, name)}) == COUNT


def test_answers_are_those_of_the_text(tasks: Path, store: Path) -> None:
    """Nothing but the text before it is in a context; the true words follow it, the others do not."""
    texts = heldout_documents(TokenStore.open(store))
    words = [" ".join(text.split()) for text in texts]

    def follows(context: str, continuation: str) -> bool:
        both = " ".join(f"{context} {continuation}".split())
        return any(both in each for each in words)

    for each in questions(tasks, "local_cloze"):
        assert any(f"{each['context']} {each['word']}" in text for text in texts)
        assert each["word"] in each["context"]
    for name, count in (("local_continuation", CHOICES), ("local_order", 2)):
        answers = set()
        for each in questions(tasks, name):
            assert len(each["choices"]) == count
            assert all(len(choice.split()) == WORDS for choice in each["choices"])
            assert [follows(each["context"], choice) for choice in each["choices"]] == [
                number == each["answer"] for number in range(count)
            ]
            answers.add(each["answer"])
        assert answers == set(range(count))
    for each in questions(tasks, "local_order"):
        assert sorted(each["choices"][0].split()) == sorted(each["choices"][1].split())


def test_too_little_text_is_said(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_tasks, "heldout_documents", lambda _: ["a few words " * 35])
    with pytest.raises(DataError, match=r"has only \d questions for local_cloze; at least 20 are needed"):
        make_tasks(TokenStore.open(store), tmp_path / "t", COUNT, 0)
    assert not (tmp_path / "t").exists()
    assert list(local_tasks.order(["one two three"], random.Random(0))) == []


def checkpoint(folder: Path, family: str, layout: str, store: Path) -> Path:
    """A checkpoint of a toy model with random weights that differ enough for scores to differ."""
    model = {"vocab_size": 300, "init_std": 0.3, **FAMILIES[family]}
    config = toy.toy_config("float32", model=model, parallel={"layout": layout}, train={"seq_len": 128})
    return save(folder, config, store / "tokenizer.json")


def scores(capture: Any, path: Path, tasks: Path, tp: int) -> dict[str, float]:
    words = ["--tasks", ",".join(NAMES), "--task-folder", tasks, "--device", "cpu", "--json", "--batch", 8]
    code, out, err = say(capture, "eval", path, *words, "--tp", tp)
    assert code == 0, err
    return {f"{row['task']} {row['metric']}": row["value"] for row in json.loads(out)["tasks"]}


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layout_scores_as_one_process(
    family: str, tasks: Path, store: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lm_eval")
    layouts = layouts_of(toy.toy_config(model=FAMILIES[family]).model)
    assert len(layouts) >= 3
    alone = scores(capfd, checkpoint(tmp_path / "one", family, layouts[0], store), tasks, 1)
    for layout in layouts:
        path = checkpoint(tmp_path / layout, family, layout, store)
        assert scores(capfd, path, tasks, 2) == pytest.approx(alone, rel=1e-4), layout
