"""Selects the checkpoint that a run resumes or starts from, and checks that it fits the run."""

import contextlib
from pathlib import Path

from boost.config import Config
from boost.data.mixture import Corpus
from boost.data.store import TokenStore
from boost.errors import CheckpointError, ConfigError, StorageError
from boost.optim.schedule import learning_rate
from boost.paths import is_folder
from boost.text import JsonObject
from boost.train import checkpoint as ckpt
from boost.train.checkpoint import Checkpoint
from boost.train.rundir import RunDirectory, flat_config

HYPERPARAMETERS: dict[str, tuple[str, ...]] = {
    "train": ("steps", "param_dtype", "compute_dtype", "reduce_dtype"),
    "optim": (),
    "data": ("isolate_documents",),
    "distill": (),
}
"""Fields that affect training and may change on resume, with a warning, by section; () means all fields. seed, seq_len
and global_batch must not change."""


def resume_candidates(resume: str | None, run: RunDirectory, fallback: Path | None = None) -> list[Path]:
    """Checkpoints that `--resume` refers to, newest first: with 'auto', all checkpoints of this run, including those in
    the `fallback` folder and the last one saved, wherever it is; otherwise, the one at the given path. Checkpoints with corrupt
    weights come last.

    Raises CheckpointError if there is no checkpoint at the path, and StorageError if a folder cannot be read.
    """
    if resume is None:
        return []
    if resume == "auto":
        try:
            found = [
                path for folder in (run.checkpoints, fallback) if folder for path in ckpt.complete_checkpoints(folder)
            ]
            if saved := run.recorded_save():
                last = ckpt.checkpoint_path(*saved)
                # With another one to fall back to, it is a candidate even without a manifest: opening it reports that.
                if last not in found and is_folder(last) and (found or ckpt.complete_checkpoints(saved[0])):
                    found.append(last)
        except OSError as error:
            raise StorageError(f"'{error.filename}' cannot be read: {error.strerror}; try again") from None
        newest_first = sorted(found, key=_step, reverse=True)
        return sorted(newest_first, key=lambda path: bool(_marks(path)[0]))
    return [ckpt.find_checkpoint(Path(resume))]


def _step(path: Path) -> int:
    return ckpt.step_of(path) or 0


def _marks(path: Path) -> tuple[str, str]:
    """`marks_of`; a state that cannot be read counts as unmarked, because opening the checkpoint reports that."""
    with contextlib.suppress(OSError):
        return ckpt.marks_of(path)
    return "", ""


def require_nothing_lost(run: RunDirectory, candidates: list[Path], restart: bool) -> None:
    """Raises CheckpointError if `--resume auto` would resume from an earlier step than the last one saved, or start at step 0,
    because checkpoints are missing. `restart` allows the latter."""
    saved = run.recorded_save()
    if candidates:
        newest = max(candidates, key=_step)
        if saved is None or saved[1] <= _step(newest):
            return
        raise CheckpointError(
            f"run.dir = '{run.path}' saved its newest checkpoint in '{ckpt.checkpoint_path(*saved)}', but it is not there; is its "
            f"file system mounted? '--resume {newest}' resumes from the newest one found"
        )
    folders = [path for path in run.checkpoints.iterdir() if ckpt.step_of(path)] if is_folder(run.checkpoints) else []
    newest_step = saved[1] if saved else max(map(_step, folders), default=None)
    if newest_step is not None and not restart:
        raise CheckpointError(
            f"run.dir = '{run.path}' holds a run that saved a checkpoint at step {newest_step}, but --resume auto finds no "
            "complete checkpoint; is its file system mounted? 'boost checkpoint list' lists checkpoints; --restart starts over "
            "at step 0 and sets the earlier metrics and folders aside"
        )


def resume_warnings(found: Checkpoint, candidates: list[Path], config: Config) -> list[str]:
    """Warnings before a run continues from `found`: about skipped newer checkpoints and changed hyperparameters."""
    warnings = [
        f"'{path}' is newer but was skipped: {trouble}; --resume {path} uses it anyway"
        for path in candidates
        if _step(path) > found.position.step and (trouble := _marks(path)[0])
    ]
    if found.position.trouble:
        warnings.append(f"'{found.path}' has corrupt weights: {found.position.trouble}")
    if found.position.doubt:
        earlier = [path for path in candidates if _step(path) < found.position.step and not any(_marks(path))]
        advice = f"; if training does not recover, use --resume {earlier[0]}" if earlier else ""
        warnings.append(f"'{found.path}' is not proven: {found.position.doubt}{advice}")
    warnings += [f"changed since '{found.path.name}': {change}" for change in changes(found.config, config)]
    step, steps = found.position.step, found.config.train.steps  # a finished run may continue
    before = learning_rate(found.config.optim, min(step, steps - 1), steps)
    now = learning_rate(config.optim, step, config.train.steps)
    if before != now and step < config.train.steps:
        was = "; without these changes it would be" if step < steps else "; at the end of the earlier schedule, it was"
        warnings.append(f"the learning rate at step {step + 1} is {now:.4g}{was} {before:.4g}")
    return warnings


def changes(before: Config, now: Config) -> list[str]:
    """Hyperparameters that differ, such as 'optim.lr 0.001 -> 0.002', in the order of the configuration."""
    lines = []
    for name in HYPERPARAMETERS:
        old, new = (flat_config(getattr(config, name).model_dump()) for config in (before, now))
        fields = HYPERPARAMETERS[name] or tuple(dict.fromkeys((*old, *new)))
        for field in fields:
            if old.get(field) != new.get(field):
                lines.append(f"{name}.{field} {old.get(field)!r} -> {new.get(field)!r}")
    return lines


def require_start(found: Checkpoint, config: Config, store: TokenStore) -> None:
    """Raises CheckpointError or DataError if a run cannot start from these weights, because the model or the tokenizer differs."""
    ckpt.require_fits(found, config.model)
    store.require_tokenizer(found.require_tokenizer(), f"'{found.path}'")


def inherited_data(config: Config, source: Checkpoint | None) -> JsonObject:
    """Data that this run's checkpoints inherit from `source`, the checkpoint that it resumes or starts from: the model's context
    length, if the run trains on shorter sequences, and other content of the original Hugging Face folder, such as a chat
    template."""
    hub: JsonObject = dict(source.data.get(ckpt.HUB) or {}) if source else {}
    context = source.context if source else 0
    longer = {"context": context} if context > config.train.seq_len else {}
    return longer | ({ckpt.HUB: hub} if hub else {})


def check_resumable(found: Checkpoint, config: Config, corpus: Corpus) -> None:
    """Raises ConfigError or CheckpointError if resuming would repeat or skip samples, or train on different data.

    The order of the data depends on the seed, the sequence length, the global batch and the weights of data.mixture.
    """
    if found.updates == 0 and found.data.get("content") is None:
        raise CheckpointError(
            f"'{found.path}' contains imported weights, not a run; start a run from it with --start-from {found.path}"
        )
    for field in ("seed", "seq_len", "global_batch"):
        before, now = getattr(found.config.train, field), getattr(config.train, field)
        if before != now:
            raise ConfigError(
                f"train.{field} = {now}, but '{found.path}' was trained with {before}, and the order of the data "
                f"depends on it; resume with train.{field} = {before}, or choose another run.dir"
            )
    if found.position.step > config.train.steps:
        raise ConfigError(
            f"train.steps = {config.train.steps}, but '{found.path}' is already at step {found.position.step}; "
            f"smallest valid value: {found.position.step}"
        )
    corpus.stores[0].require_tokenizer(str(found.data.get("tokenizer")), f"'{found.path}'")
    identity = corpus.identity()
    if found.data.get("content") == identity["content"]:
        return
    before, now = (sorted(text["content"] for text in data.get("sources", ())) for data in (found.data, identity))
    if before and before == now:
        raise ConfigError(
            f"data.mixture = {config.data.mixture}, but '{found.path}' was trained with the weights "
            f"{found.config.data.mixture}, and the order of the data depends on them; resume with them, or choose another run.dir"
        )
    setting = f"data.mixture = {config.data.mixture}" if config.data.mixture else f"data.store = '{config.data.store}'"
    raise CheckpointError(
        f"'{found.path}' was trained on different text than {setting} contains; resume with the stores that it was trained on"
    )
