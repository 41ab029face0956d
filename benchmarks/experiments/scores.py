"""Scores of trained models on tasks made from held-out text, run through lm-evaluation-harness."""

import contextlib
import io
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.local_tasks import TASKS, make_tasks
from boost.config import Config
from boost.data.fit import open_fitting_store
from boost.errors import ConfigError
from boost.models.decoder import Decoder
from boost.train.loop import Trainer

SCORES = {
    "local_cloze acc": "cloze, %",
    "local_continuation acc": "continuation, %",
    "local_order acc": "order, %",
}
"""Accuracies by "task metric", with their headings."""
EXPLAINED = (
    "Cloze: the next word, which the context contains, by greedy decoding. Continuation: the next eight words among three runs of "
    "words from elsewhere (chance: 25 %). Order: the next eight words against the same words shuffled (chance: 50 %)."
)
BATCH = 32
"""Requests per forward pass."""


def require_harness() -> None:
    """Raises ConfigError if lm-evaluation-harness is not installed."""
    try:
        import lm_eval  # noqa: F401
    except ImportError:
        raise ConfigError(
            "--questions needs lm-evaluation-harness; install it with: pip install 'boost-llm[tasks]'"
        ) from None


@contextlib.contextmanager
def task_folder(config: Config, questions: int) -> Iterator[Path | None]:
    """A temporary folder with `questions` questions per task from the held-out text of the configuration's store; None for 0."""
    if not questions:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="boost-tasks-") as folder:
        make_tasks(open_fitting_store(config), Path(folder), questions, seed=0)
        yield Path(folder)


def scores(trainer: Trainer, folder: Path) -> dict[str, float]:
    """Accuracy of the trainer's model on each task of `folder`, in [0, 1], by the names of SCORES.

    All TP ranks call it; only the first one of a machine gets a result, and the others an empty one.
    """
    from boost.train.harness import HarnessModel, run_tasks

    store, model = open_fitting_store(trainer.config), trainer.model
    assert isinstance(model, Decoder)  # these experiments have no pipeline
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    with contextlib.redirect_stderr(io.StringIO()):  # progress bars of the harness
        harness = HarnessModel(
            model, store.tokenizer(), None, store.eos, trainer.config.train.seq_len, BATCH, shows=False
        )
        rows = run_tasks(harness, [task.name for task in TASKS], folder, bootstraps=0)
    found = {f"{row['task']} {row['metric']}": row["value"] for row in rows}
    return {name: found[name] for name in SCORES if found}
