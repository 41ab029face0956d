"""Tasks made from held-out text: deterministic, and with the right answers."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import local_tasks
from benchmarks.local_tasks import CHOICES, TASKS, WORDS, heldout_documents, make_tasks
from boost.data.store import TokenStore

NAMES = [task.name for task in TASKS]
COUNT = 20


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
