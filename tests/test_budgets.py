"""What a reader of one block, or of one training step, has to follow: Python calls, functions and files of `boost/`.

Each number is what was measured when it was written down. Whoever rewrites a part lowers its budget; none is raised without a
reason in the commit.
"""

import gc
import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest

import boost
from boost.config import Config
from boost.config.load import load
from boost.train.events import StepEnd
from boost.train.hooks import Hook
from tests import toy
from tests.distributed import run_distributed

ROOT = str(Path(boost.__file__).parent)
COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
"""Not functions to a reader; and since Python 3.12 most are not called."""


class Footprint(NamedTuple):
    """What ran."""

    calls: int
    functions: int
    files: int

    def exceeds(self, budget: "Footprint") -> bool:
        return any(actual > allowed for actual, allowed in zip(self, budget, strict=True))


class Calls:
    """Records calls of this thread into `boost/`, while it is active.

    Nothing is collected meanwhile: garbage of an earlier test has finalizers, and they are not part of what is recorded.
    """

    def __init__(self) -> None:
        self._calls: list[tuple[str, str]] = []

    def start(self) -> None:
        gc.collect()
        gc.disable()
        sys.setprofile(self._see)

    def stop(self) -> Footprint:
        sys.setprofile(None)
        gc.enable()
        functions = set(self._calls)
        return Footprint(len(self._calls), len(functions), len({file for file, _ in functions}))

    def _see(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOT) and code.co_name not in COMPREHENSIONS:
            self._calls.append((code.co_filename, code.co_qualname))


def demo(*words: str) -> Config:
    small = "--model.layers 2 --model.vocab_size 300 --train.seq_len 32 --train.micro_batch 2 --train.global_batch 2"
    return load("demo", [*small.split(), *words])


def forward_of_a_block(config: Config) -> Footprint:
    """The second block in the second forward pass, with gradients: the first pass fills caches."""
    decoder, _ = toy.toy_decoder(config)
    block: Any = decoder.blocks[1]
    usual, seen = block.forward, []

    def counted(*arguments: Any) -> Any:
        calls = Calls()
        calls.start()
        streams = usual(*arguments)
        seen.append(calls.stop())
        return streams

    block.forward = counted
    for _ in range(2):
        decoder(*toy.toy_tokens(config))
    return seen[1]


BLOCKS = {
    "single": Footprint(calls=68, functions=35, files=8),
    "btp": Footprint(calls=100, functions=45, files=10),
    "btp-sp": Footprint(calls=112, functions=48, files=10),
}
"""One block's forward pass, by layout; all but single on two processes."""


HEADS = {"attn_bias": "qkvo", "qk_norm": True, "nope_layers": [0], "head_dim": 16}
MORE_CALLS = 5
"""What biases and norms may add to the calls of a block's forward pass."""


def test_biases_and_norms_of_heads_add_few_calls() -> None:
    config = demo("--parallel.layout", "btp", "--parallel.tp", "2")
    config = config.changed(model=HEADS)
    seen = run_distributed(2, forward_of_a_block, config)[0]
    assert seen.calls <= BLOCKS["btp"].calls + MORE_CALLS, seen


@pytest.mark.parametrize("layout", BLOCKS)
def test_the_forward_pass_of_a_block(layout: str) -> None:
    size = 1 if layout == next(iter(BLOCKS)) else 2
    config = demo("--parallel.layout", layout, "--parallel.tp", str(size))
    seen = forward_of_a_block(config) if size == 1 else run_distributed(size, forward_of_a_block, config)[0]
    assert not seen.exceeds(BLOCKS[layout]), seen


class OneStep(Hook):
    """Records the third step, with everything between it and the second one."""

    def __init__(self) -> None:
        self.calls, self.seen = Calls(), Footprint(0, 0, 0)

    def after_step(self, trainer: Any, event: StepEnd) -> None:
        if event.metrics.step == 2:
            self.calls.start()
        elif event.metrics.step == 3:
            self.seen = self.calls.stop()


STEP = Footprint(calls=693, functions=152, files=31)
"""One step of `boost train` on one process, with its hooks and its looks at the run directory's lock and the next step's data."""


def test_a_training_step(store: Path, tmp_path: Path) -> None:
    words = f"--parallel.tp 1 --train.steps 4 --train.eval_every 0 --train.save_every 0 --data.store {store}"
    watch = OneStep()
    config = demo(*words.split(), "--run.dir", str(tmp_path / "run"), "--run.device", "cpu", "--run.peak_tflops", "1")
    boost.Trainer(config, hooks=[watch]).fit()
    assert not watch.seen.exceeds(STEP), watch.seen


EVENING = 2694
"""Lines that a reader of the core reads in one evening."""


def test_the_core_is_read_in_an_evening() -> None:
    page = Path(__file__).parents[1] / "docs" / "design.md"
    table = page.read_text(encoding="utf-8").partition("Then read, as needed")[0]
    files = [page.parent / link for link in re.findall(r"\]\((\.\./boost/[\w/]+\.py)\)", table)]
    lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
    assert len(files) == 12 and lines <= EVENING, (len(files), lines)


CORE = (
    "models/",
    "layouts/",
    "config/layouts/",
    "parallel/",
    "train/step.py",
    "optim/adamw.py",
    "config/architecture.py",
    "families/",
)
CORE_FILES, CORE_LINES = 43, 6982


def test_the_core_is_small() -> None:
    """Models, layouts, what runs between processes, the step, AdamW, and the facts of an architecture."""
    files = [path for path in Path(ROOT).rglob("*.py") if path.relative_to(ROOT).as_posix().startswith(CORE)]
    lines = [len(path.read_text(encoding="utf-8").splitlines()) for path in files]
    assert sum(map(bool, lines)) <= CORE_FILES and sum(lines) <= CORE_LINES, (sum(map(bool, lines)), sum(lines))
