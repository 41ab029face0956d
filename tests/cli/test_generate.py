"""`boost generate`: where prompts come from, and what is printed."""

import io
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from boost.train.checkpoint import Checkpoint
from tests.cli.commands import Capture, done, say

SHORT = ("--max-tokens", 6, "--seed", 3)
Generate = Callable[..., str]


@pytest.fixture
def generate(checkpoint: Path, capsys: Capture) -> Generate:
    """The stdout of `boost generate` with these words."""
    return lambda *words: done(capsys, "generate", checkpoint, *words)


def type_in(monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
    """Replaces standard input with a pipe that contains `text`."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "wb") as pipe:
        pipe.write(text)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(os.fdopen(reading, "rb")))


def lines_of(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


def test_each_of_several_prompts_is_continued_as_if_it_were_alone(generate: Generate) -> None:
    prompts = ["def ", "import os\n", ""]
    alone = [lines_of(generate("--prompt", p, "--json", *SHORT)) for p in prompts]
    words = [word for p in prompts for word in ("--prompt", p)]
    out = generate(*words, "--json", *SHORT)
    assert lines_of(out) == [each for (each,) in alone]
    assert [each["prompt"] for each in lines_of(out)] == prompts
    out = generate(*words, *SHORT)
    texts = [f"--- {n} of 3\n{each['prompt']}{each['text']}\n" for n, (each,) in enumerate(alone, start=1)]
    assert out == "".join(texts)


def test_samples_of_a_prompt_differ(generate: Generate) -> None:
    words: tuple[object, ...] = ("--prompt", "def ", "--prompt", "class Toy", "--max-tokens", 6, "--temperature", 1.5)
    words = (*words, "--seed", 3, "--samples", 2)
    expected = lines_of(generate(*words, "--json"))
    assert [(line["prompt"], line["sample"]) for line in expected] == list(
        itertools.product(["def ", "class Toy"], [0, 1])
    )
    assert len({line["text"] for line in expected}) == 4
    out = generate(*words)
    headers = [f"--- {prompt} of 2, sample {sample} of 2" for prompt in (1, 2) for sample in (1, 2)]
    each = zip(headers, expected, strict=True)
    assert out == "".join(f"{header}\n{line['prompt']}{line['text']}\n" for header, line in each)


def test_prompts_of_files(tmp_path: Path, checkpoint: Path, capsys: Capture) -> None:
    plain, structured = tmp_path / "p.txt", tmp_path / "p.jsonl"
    odd = "class \x0c \x85 \u2028"  # what else splits lines, but not those of a file
    plain.write_text(f"def \r\n\n{odd}\n", encoding="utf-8", newline="")
    structured.write_text('{"prompt": "a\\nb"}\n{"prompt": "class ", "id": 7}\n')
    warning = f"warning: --prompts = '{structured}': fields without effect: id\n"
    for file, expected, said in ((plain, ["x", "def ", odd], ""), (structured, ["x", "a\nb", "class "], warning)):
        code, out, err = say(capsys, "generate", checkpoint, "--prompts", file, "--prompt", "x", "--json", *SHORT)
        assert ([line["prompt"] for line in lines_of(out)], code, err) == (expected, 0, said)


@pytest.mark.parametrize(("words", "expected"), [([], ["a\nb"]), (["--prompt", "c"], ["c"])])
def test_standard_input(
    words: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch, generate: Generate
) -> None:
    type_in(monkeypatch, b"a\nb\n")
    out = generate(*words, "--json", *SHORT)
    assert [each["prompt"] for each in lines_of(out)] == expected


@pytest.mark.parametrize(
    ("content", "words", "expected"),
    [
        (b"\n", ["--prompts", "FILE"], "is empty; write one prompt per line"),
        (b"\xff", ["--prompts", "FILE"], "is not valid UTF-8 (invalid byte at offset 0)"),
        (b'{"text": "x"}', ["--prompts", "FILE"], 'line 1 is not of the form {"prompt": "text"}'),
        (b"", ["--prompts", "nowhere"], "--prompts = 'nowhere' cannot be read: No such file"),
        (b'{"prompt": "\\ud800"}', ["--prompts", "FILE"], "line 1 is not valid Unicode"),
        (b"", ["--prompt", "a", "--samples", "-1"], "--samples = -1 is too small; smallest valid value: 1"),
        (b'{"prompt": ["x"]}', ["--prompts", "FILE"], 'of the form {"prompt": "text"}'),
    ],
)
def test_mistakes(
    content: bytes, words: list[str], expected: str, tmp_path: Path, checkpoint: Path, capsys: Capture
) -> None:
    file = tmp_path / "p.jsonl"
    file.write_bytes(content)
    code, out, err = say(capsys, "generate", checkpoint, *(str(file) if w == "FILE" else w for w in words))
    assert (code, out) == (2, "")
    assert err.count("\n") == 1 and expected in err


def test_text_beyond_the_context_is_a_warning(
    checkpoint: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("generate", checkpoint, "--prompt", "def ", *SHORT, "--json")
    code, out, err = say(capsys, *words)
    assert (code, err) == (0, "")
    monkeypatch.setattr(Checkpoint, "context", 5)
    code, again, err = say(capsys, *words)
    assert (code, again) == (0, out)
    assert "but the model's context length is 5" in err
