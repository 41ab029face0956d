"""Scores trained models on tasks made from held-out text, with lm-evaluation-harness."""

import contextlib
import functools
import io
import logging
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.local_tasks import TASKS, make_tasks
from boost.config import Config
from boost.data.fit import open_corpus
from boost.errors import ConfigError
from boost.models.decoder import Decoder
from boost.train.loop import Trainer

SCORES = {"local_cloze acc": "cloze, %", "local_continuation acc": "continuation, %", "local_order acc": "order, %"}
"""Headings of accuracies, by "task metric"."""
EXPLAINED = (
    "Cloze asks for the next word, which the context contains, and scores greedy decoding. Continuation asks which of four "
    "eight-word passages comes next (chance: 25%). Order asks which of two arrangements of the next words is true (chance: 50%)."
)
BATCH = 32
"""Requests per forward pass."""


def require_harness() -> None:
    """Raises ConfigError if lm-evaluation-harness is not installed."""
    try:
        import lm_eval  # noqa: F401
    except ImportError:
        raise ConfigError("--questions needs lm-evaluation-harness; install it with: pip install lm_eval") from None


@contextlib.contextmanager
def task_folder(config: Config, questions: int) -> Iterator[Path | None]:
    """A temporary folder with `questions` questions per task from the held-out text of the configuration's store; None for 0."""
    if not questions:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="boost-tasks-") as folder:
        make_tasks(open_corpus(config).stores[0], Path(folder), questions, seed=0)
        yield Path(folder)


@dataclass(frozen=True)
class Scored:
    """Scores of one model."""

    accuracy: dict[str, float]
    """Accuracy on each task, in [0, 1], by the names in SCORES."""
    answers: str
    """One digit per question, task by task: the choice, or for a cloze 1 if greedy decoding gives the word, otherwise 0."""


def scored(trainer: Trainer, folder: Path) -> Scored | None:
    """Scores the trainer's model on the tasks in `folder`. All TP ranks call this; only the first on each machine gets scores."""
    from boost.train.harness import HarnessModel, rows_of, run_tasks

    store, model = open_corpus(trainer.config).stores[0], trainer.model
    assert isinstance(model, Decoder)  # these experiments have no pipeline
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    # Hide the harness's progress bars.
    with contextlib.redirect_stderr(io.StringIO()), _quick_harness(alone=trainer.mesh.size == 1):
        harness = HarnessModel(
            model, store.tokenizer(), None, store.eos, [store.eos], trainer.config.train.seq_len, BATCH, shows=False
        )
        found = run_tasks(harness, [task.name for task in TASKS], folder, log_samples=True, bootstrap_iters=0)
    if not found:
        return None
    values = {f"{row['task']} {row['metric']}": row["value"] for row in rows_of(found)}
    answers = (_answer(sample) for task in TASKS for sample in found["samples"][task.name])
    return Scored({name: values[name] for name in SCORES}, "".join(map(str, answers)))


def _answer(sample: dict[str, Any]) -> int:
    """The likeliest choice (on ties the first, as in the harness); for a single continuation, whether greedy decoding yields it."""
    each = [score for score, _ in sample["filtered_resps"]]
    return each.index(max(each)) if len(each) > 1 else int(sample["filtered_resps"][0][1])


@contextlib.contextmanager
def _quick_harness(alone: bool) -> Iterator[None]:
    """Context manager that makes the harness compile a task's templates once, not for every question, and skip the program that
    describes the machine, which takes a third of a small model's scoring time. With `alone`, a single-process model gets its
    result, although the harness returns it only on LOCAL_RANK 0."""
    import lm_eval.evaluator
    from lm_eval.utils import env

    compiled = functools.cache(env.from_string)
    with (
        mock.patch.object(env, "from_string", compiled),
        mock.patch.object(lm_eval.evaluator, "add_env_info"),
        mock.patch.dict(os.environ, {"LOCAL_RANK": "0"} if alone else {}),
    ):
        yield
