"""The first hour: the shell commands of the pages, in their order, in one folder, at toy size."""

import bisect
import re
import secrets
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from boost.cli.main import main
from tests.cli.commands import Capture, llama_of

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/start.md", "docs/healing.md", "docs/generate.md", "docs/hugging-face.md")
PROGRAMS = ("boost", "make", "pip", "uv", "python", "curl", "transformers", "torchrun", "hf", "lm_eval")

SKIPPED = {
    "make setup": "the environment exists",
    ". .venv/bin/activate": "the environment exists",
    "pip install": "the environment exists",
    "examples/recipes": "downloads; tests/train/test_examples.py",
    "examples/long.toml": "takes minutes",
    "transformers serve": "tests/convert/test_serve.py",
    "curl": "tests/convert/test_serve.py",
    "lm_eval": "downloads tasks",
}
"""Commands that do not run, by a part of their text, with the reason."""

MODEL = "--model.dim 32 --model.ffn_dim 48 --model.layers 2 --model.heads 4 --model.rank 8"
STEPS = "--train.steps 2 --train.seq_len 32 --train.global_batch 8 --train.eval_every 2 --optim.warmup_steps 1 --run.device cpu"
TOY = f"{MODEL} --model.vocab_size 320 {STEPS} --train.micro_batch 4"
SMALLER = {
    "make train": "boost prepare my-texts/ --out data/stdlib && boost train demo --resume auto",
    "boost prepare my-texts/ --out": "boost prepare my-texts/ --tokenizer train:300 --out",
    "--tokenizer train:16000": "--tokenizer train:310",
    "--tokenizer train:32000": "--tokenizer train:320",
    "boost config laptop": f"boost config laptop {TOY}",
    "boost train laptop": f"boost train laptop {TOY}",
    "boost train demo": f"boost train demo {TOY}",
    "boost train --start-from": f"boost train {STEPS} --train.micro_batch 4 --start-from",
    "--max-tokens 200": "--max-tokens 8",
    "--nproc-per-node 8": "--nproc-per-node 2",
    "--parallel.dp 8": "--parallel.dp 2",
    "--gpus 64": "--gpus 2",
    "--gpus 8": "--gpus 2",
    "--model cola-130m": f"--model cola-130m {MODEL} {STEPS}",
    "--model cola-350m": f"--model cola-350m --parallel.dp 2 {MODEL} {STEPS}",
    "--parallel.tp 8": "--parallel.tp 2",
    "--parallel.tp 2 --parallel.pp 2 --parallel.dp 2": "--parallel.tp 2 --parallel.pp 1 --parallel.dp 1",
    "boost verify --nproc 1": "boost verify --nproc 1 --only machines",
}
"""What makes a command small, by the text that it replaces. All else runs as it stands on the page."""


def commands(page: Path) -> Iterator[str]:
    """The commands in a page's indented blocks. A block belongs to the shell if its first word is a program."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    for block in re.findall(r"^ {4}\S.*\n(?: {4}.*\n|\n(?= {4}))*", text, re.MULTILINE):
        if block.split()[0] in PROGRAMS:
            yield from re.findall(r"^ {4}((?:\"[^\"]*\"|'[^']*'|#.*|[^\n\"'#])+)", block, re.MULTILINE)


def walk(pages: tuple[str, ...], capture: Capture, but: str = "nothing") -> set[str]:
    """Runs the commands of pages, but those with this text. Returns the keys of `SKIPPED` and `SMALLER` that were needed."""
    needed = set()
    for page in pages:
        for line in commands(ROOT / page):
            if skipped := {text for text in (*SKIPPED, but) if text in line}:
                needed |= skipped
                continue
            toy = line
            for text, smaller in SMALLER.items():
                if text in toy:
                    needed.add(text)
                    toy = toy.replace(text, smaller)
            for command in toy.split(" && "):
                words, _, target = command.partition(" > ")
                program, *arguments = shlex.split(words, comments=True)
                assert program == "boost", f"{page}: neither run nor skipped: {line}"
                code = main(arguments)
                out, err = capture.readouterr()
                assert code == 0, f"{page}: {line}\nas {command}\n{out[-2000:]}\n{err}"
                if target:
                    Path(target.split()[0]).write_text(out, encoding="utf-8")
    return needed


@pytest.fixture
def folder(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the files that a user brings."""
    texts = tmp_path / "my-texts"
    texts.mkdir()
    for module in (bisect, secrets, shlex):
        text = Path(str(module.__file__)).read_text(encoding="utf-8")
        (texts / f"{module.__name__}.txt").write_text(text, encoding="utf-8")
    llama_of(store, tmp_path / "models" / "llama", tie_word_embeddings=True)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "def main"}\n')
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_the_first_page(capfd: Capture) -> None:
    walk(("docs/start.md",), capfd, but="boost launch")  # tests/cli/test_launch.py


@pytest.mark.nightly
@pytest.mark.usefixtures("folder")
def test_all_pages(capfd: Capture) -> None:
    assert walk(PAGES, capfd) == {*SKIPPED, *SMALLER}
