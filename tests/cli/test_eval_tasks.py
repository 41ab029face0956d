"""`boost eval --tasks`: lm-evaluation-harness on tasks whose data is a local file."""

import argparse
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from boost.cli.inference import open_model
from boost.data.tokenizer import load_tokenizer
from boost.errors import ConfigError
from tests.cli.commands import Capture, done, refused, say
from tests.convert.toys import bring, llama_folder

pytestmark = pytest.mark.slow  # imports the harness, and with it transformers


@pytest.fixture(autouse=True, scope="module")
def imported() -> None:
    """By the worker that runs this file alone: every worker collects it, and the import takes seconds."""
    pytest.importorskip("lm_eval", reason="needs the extra 'tasks': pip install lm_eval")


KINDS: dict[str, dict[str, Any]] = {
    "choice": {
        "output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}", "metric_list": [{"metric": "acc"}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{question}}{{choices[0]}}",
        "metric_list": [{"metric": "byte_perplexity"}],
    },
    "answer": {
        "output_type": "generate_until", "doc_to_text": "{{question}}", "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 4, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}  # fmt: skip
QUESTIONS: list[dict[str, Any]] = [
    {"question": "import ", "choices": ["os", "class lambda"], "answer": 0},
    {"question": "def main(", "choices": ["argv):", "yield yield yield yield"], "answer": 1},
    {"question": "", "choices": ["a", "bb"], "answer": 0},
]


def write_tasks(folder: Path, questions: list[dict[str, Any]]) -> Path:
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(each) + "\n" for each in questions))
    source = {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")}
    for name, kind in KINDS.items():
        task = {"task": f"toy_{name}", "dataset_path": "json", "dataset_kwargs": source, "test_split": "test", **kind}
        (folder / f"{name}.yaml").write_text(json.dumps(task))
    return folder


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks"), QUESTIONS)


def mine(tasks: Path) -> list[object]:
    return ["--task-folder", tasks, "--trust-task-code"]


def test_code_in_a_task_folder_runs_only_if_it_is_trusted(checkpoint: Path, tmp_path: Path, capsys: Capture) -> None:
    write_tasks(tmp_path, QUESTIONS)
    task = json.loads((tmp_path / "choice.yaml").read_text())
    text = "".join(f"{key}: {json.dumps(of)}\n" for key, of in task.items())
    (tmp_path / "choice.yaml").write_text(f"{text}process_docs: !function code.write\n")
    (tmp_path / "code.py").write_text(
        f"def write(docs):\n    open({str(tmp_path / 'ran')!r}, 'w').close()\n    return docs\n"
    )
    words = ["--tasks", "toy_choice", "--task-folder", tmp_path, "--device", "cpu"]
    code, _, err = say(capsys, "eval", checkpoint, *words)
    assert code == 2 and "read them, then add --trust-task-code" in err and not (tmp_path / "ran").exists()
    assert say(capsys, "eval", checkpoint, *words, "--trust-task-code")[0] == 0
    assert (tmp_path / "ran").exists(), "the file does run then"


def scored(checkpoint: Path, context: str, continuation: str) -> float:
    """Log-likelihood of a continuation, from the decoder's own next-token logits."""
    import torch

    found, _, _, decoder = open_model(argparse.Namespace(checkpoint=str(checkpoint), tp=1, device="cpu"))
    tokenizer = load_tokenizer(found.tokenizer)
    tokens = tokenizer.encode(context + continuation, add_special_tokens=False).ids
    start = len(tokenizer.encode(context, add_special_tokens=False).ids)
    if not context:
        tokens, start = [0, *tokens], 1
    total = 0.0
    for position in range(start, len(tokens)):
        logits = decoder.next_logits(torch.tensor([tokens[:position]]), decoder.make_caches(1, position))
        total += float(logits.log_softmax(-1)[0, tokens[position]])
    return total


def test_scores_are_those_of_the_decoder(
    checkpoint: Path, tasks: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--tasks", "toy_choice,toy_rolling", *mine(tasks), "--device", "cpu", "--json"]
    rows: list[list[dict[str, Any]]] = []
    for batch in (1, 4):
        out = done(capsys, "eval", checkpoint, *words, "--batch", batch)
        rows.append(json.loads(out)["tasks"])
    by_name = {(row["task"], row["metric"]): row["value"] for row in rows[0]}
    for row in rows[1]:
        assert row["value"] == pytest.approx(by_name[row["task"], row["metric"]], rel=1e-5)
    right, nats, size = 0, 0.0, 0
    for each in QUESTIONS:
        question, choices = str(each["question"]), list(each["choices"])
        # As the harness does, a space at the end of the context belongs to the continuation.
        context = question.rstrip()
        scores = [scored(checkpoint, context, question[len(context) :] + choice) for choice in choices]
        right += scores.index(max(scores)) == each["answer"]
        nats += scored(checkpoint, "", question + choices[0])
        size += len((question + choices[0]).encode())
    assert by_name["toy_choice", "acc"] == pytest.approx(right / len(QUESTIONS))
    assert by_name["toy_rolling", "byte_perplexity"] == pytest.approx(math.exp(-nats / size), rel=1e-4)


def test_answers_are_what_generate_says(checkpoint: Path, tmp_path: Path, capsys: Capture) -> None:
    """exact_match is 1 if the expected answers are what `boost generate` returns."""
    questions = []
    for each in QUESTIONS[:2]:
        words = ["--prompt", each["question"], "--greedy", "--max-tokens", 4, "--json"]
        text = json.loads(say(capsys, "generate", checkpoint, *words)[1])["text"].partition("\n")[0]
        questions.append({"question": each["question"], "choices": [text], "answer": 0})
    words = ["--tasks", "toy_answer", *mine(write_tasks(tmp_path, questions)), "--device", "cpu", "--json"]
    out = done(capsys, "eval", checkpoint, *words)
    (row,) = json.loads(out)["tasks"]
    assert (row["metric"], row["value"]) == ("exact_match", 1.0)


def test_an_answer_stops_at_any_of_several_end_tokens(checkpoint: Path) -> None:
    from boost.train.generate import generate
    from boost.train.harness import HarnessModel
    from boost.train.sampling import Sampling

    found, _, _, decoder = open_model(argparse.Namespace(checkpoint=str(checkpoint), tp=1, device="cpu"))
    tokenizer = load_tokenizer(found.tokenizer)

    def answer(ends: list[int]) -> str:
        return HarnessModel(decoder, tokenizer, None, 0, ends, 64, 1, shows=False)._answer("def ", {"max_gen_toks": 8})

    prompt = tokenizer.encode("def ", add_special_tokens=False).ids
    tokens = list(generate(decoder, prompt, 8, Sampling(0.0)))
    harness = HarnessModel(decoder, tokenizer, None, 0, [], 64, 1, shows=False)
    for limit in ("max_gen_toks", "max_new_tokens", "max_tokens"):  # names that the harness knows
        assert harness._answer("def ", {limit: 3, "num_beams": 1}) == tokenizer.decode(tokens[:3])
    assert len({harness._answer("def ", {"max_gen_toks": 8, "temperature": 9.0, "seed": None}) for _ in range(2)}) == 1
    assert harness._answer("def ", {"max_gen_toks": 8, "temperature": 9.0}) != tokenizer.decode(tokens)
    with pytest.raises(ConfigError, match="num_beams = 4 in generation_kwargs is not supported"):
        harness._answer("def ", {"num_beams": 4})
    without, after_eos = harness._loglikelihood_tokens([(None, [], prompt), (None, [0], prompt)])
    assert without == after_eos, "a context of white space alone, which belongs to the continuation"
    assert answer([0, tokens[2]]) == tokenizer.decode(tokens[: tokens.index(tokens[2]) + 1])
    assert answer([]) == tokenizer.decode(tokens) != answer([0, tokens[2]])


def test_long_requests_are_scored_as_the_harness_scores_the_folder(
    store: Path, checkpoint: Path, tmp_path: Path, capsys: Capture
) -> None:
    """In the whole context of the model; what is longer than that is named."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    folder, words = tmp_path / "theirs", ["--tasks", "toy_rolling", "--device", "cpu"]
    llama_folder(folder, vocab_size=300, max_position_embeddings=4096, eos_token_id=0, bos_token_id=7)
    shutil.copy(store / "tokenizer.json", folder)
    bos = Tokenizer.from_file(str(store / "tokenizer.json")).id_to_token(7)  # named, but no text starts with it
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>", "bos_token": bos}))
    tasks = write_tasks(tmp_path, [{"question": "import os\n" * 500, "choices": ["x"], "answer": 0}])
    bring(folder, tmp_path / "c")
    (row,) = json.loads(done(capsys, "eval", tmp_path / "c", *words, *mine(tasks), "--json"))["tasks"]
    expected = simple_evaluate(
        "hf", {"pretrained": str(folder), "device": "cpu"}, ["toy_rolling"],
        task_manager=TaskManager(include_path=tasks, include_defaults=False),
    )["results"]["toy_rolling"]["byte_perplexity,none"]  # fmt: skip
    assert row["value"] == pytest.approx(expected, rel=1e-6)
    code, _, err = say(capsys, "eval", checkpoint, "--tasks", "toy_choice", *words[2:], *mine(tasks))
    assert code == 0 and "warning: 1 requests are longer than the context of" in err


def test_a_table_and_a_limit(checkpoint: Path, tasks: Path, capsys: Capture) -> None:
    words = ["--tasks", "toy_choice", *mine(tasks), "--device", "cpu", "--limit", 1]
    out = done(capsys, "eval", checkpoint, *words)
    assert any(line.split()[:2] == ["toy_choice", "acc"] for line in out.splitlines())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--limit", "3"], "--limit = 3 has no effect without --tasks"),
        (["--tasks", "toy_choice", "--limit", "0"], "--limit = 0 is too small; smallest valid value: 1"),
        (["--tasks", "toy_choice", "--fewshot", "-1"], "--fewshot = -1 is too small; smallest valid value: 0"),
        (["--tasks", "toy_choice", "--store", "data/x"], "--store = data/x has no effect with --tasks"),
        (["--tasks", "toy_choice", "--task-folder", "/nowhere"], "--task-folder = '/nowhere' is not a folder"),
    ],
)
def test_mistakes(words: list[str], expected: str, checkpoint: Path, tasks: Path, capsys: Capture) -> None:
    folder = [] if "--task-folder" in words or "--limit" in words[:1] else mine(tasks)
    code, _, err = say(capsys, "eval", checkpoint, "--device", "cpu", *words, *folder)
    assert code == 2
    assert expected in err.splitlines()[-1]


@pytest.mark.parametrize("lists", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_an_unknown_task(
    lists: bool, checkpoint: Path, tasks: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By night only, the harness lists its own thousands of tasks, which takes half a minute."""
    from boost.train import harness

    usual, asked = harness.TaskManager, list[bool]()

    def manager(include_path: Path, include_defaults: bool = True) -> Any:
        asked.append(include_defaults)
        return usual(include_path=include_path, include_defaults=include_defaults and lists)

    monkeypatch.setattr(harness, "TaskManager", manager)
    err = refused(capsys, "eval", checkpoint, "--device", "cpu", "--tasks", "toy_choise", *mine(tasks))
    assert "unknown task 'toy_choise'; did you mean 'toy_choice'?" in err.splitlines()[-1]
    assert asked == [False, True]


def test_two_processes_score_as_one(checkpoint: Path, tasks: Path, capfd: Capture) -> None:
    found = []
    for tp in (1, 2):
        words = ["--tasks", "toy_rolling,toy_choice", *mine(tasks), "--device", "cpu", "--json", "--tp", tp]
        out = done(capfd, "eval", checkpoint, *words)
        found.append({row["task"]: row["value"] for row in json.loads(out)["tasks"]})
    assert found[1] == pytest.approx(found[0], rel=1e-5)
