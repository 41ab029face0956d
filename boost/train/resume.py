"""Selects the checkpoint that a run resumes or starts from, and checks that it fits the run."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from boost.config import Config
from boost.data.mixture import Corpus
from boost.data.store import TokenStore
from boost.errors import CheckpointError, ConfigError
from boost.optim.schedule import learning_rate
from boost.train import checkpoint as ckpt
from boost.train.checkpoint import Checkpoint
from boost.train.rundir import RunDirectory

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
    the `fallback` folder; otherwise, the one at the given path. Checkpoints with corrupt weights come last.

    Raises CheckpointError if there is no checkpoint at the path.
    """
    if resume is None:
        return []
    if resume == "auto":
        found = [path for folder in (run.checkpoints, fallback) if folder for path in ckpt.complete_checkpoints(folder)]
        newest_first = sorted(found, key=_step, reverse=True)
        return sorted(newest_first, key=lambda path: bool(ckpt.marks_of(path)[0]))
    return [ckpt.find_checkpoint(Path(resume))]


def _step(path: Path) -> int:
    return ckpt.step_of(path) or 0


def require_nothing_lost(run: RunDirectory, candidates: list[Path], restart: bool) -> None:
    """Raises CheckpointError if `--resume auto` would start at step 0 because the run's saved checkpoints are missing.
    `restart` allows this."""
    if candidates or restart:
        return
    saved = run.last_saved_step()
    folders = [path for path in run.checkpoints.iterdir() if ckpt.step_of(path)] if run.checkpoints.is_dir() else []
    if saved is None and folders:
        saved = max(_step(path) for path in folders)
    if saved is not None:
        raise CheckpointError(
            f"run.dir = '{run.path}' holds a run that saved a checkpoint at step {saved}, but --resume auto finds no "
            "complete checkpoint; is its file system mounted? 'boost checkpoint list' lists checkpoints; --restart starts over "
            "at step 0 and sets the earlier metrics and folders aside"
        )


def resume_warnings(found: Checkpoint, candidates: list[Path], config: Config) -> list[str]:
    """Warnings before a run continues from `found`: about skipped newer checkpoints and changed hyperparameters."""
    warnings = [
        f"'{path}' is newer but was skipped: {trouble}; --resume {path} uses it anyway"
        for path in candidates
        if _step(path) > found.position.step and (trouble := ckpt.marks_of(path)[0])
    ]
    if found.position.trouble:
        warnings.append(f"'{found.path}' has corrupt weights: {found.position.trouble}")
    if found.position.doubt:
        earlier = [path for path in candidates if _step(path) < found.position.step and not any(ckpt.marks_of(path))]
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
        old, new = (_flat(getattr(config, name).model_dump()) for config in (before, now))
        fields = HYPERPARAMETERS[name] or tuple(dict.fromkeys((*old, *new)))
        for field in fields:
            if old.get(field) != new.get(field):
                lines.append(f"{name}.{field} {old.get(field)!r} -> {new.get(field)!r}")
    return lines


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value) if isinstance(value, dict) else {key: value}
    return flat


def check_start(start_from: str, config: Config, store: TokenStore) -> Checkpoint:
    """Opens the checkpoint whose weights a run starts from.

    Raises CheckpointError or DataError if its model or its tokenizer differs.
    """
    found = ckpt.open_checkpoint(Path(start_from))
    ckpt.require_fits(found, config.model)
    store.require_tokenizer(found.require_tokenizer(), f"'{found.path}'")
    return found


def inherited_data(
    config: Config, corpus: Corpus, resume_from: Sequence[Path], start_from: str | None
) -> dict[str, Any]:
    """Data that this run's checkpoints inherit from the checkpoint that it resumes or starts from: the model's context length, if
    the run trains on shorter sequences, and other content of the original Hugging Face folder, such as a chat template. If
    that folder has no template, the chat template of a store of conversations is used. Replicas that rejoin without
    loading a checkpoint also need this data."""
    hub: dict[str, Any] = {}
    context = 0
    for path in (*resume_from, *([Path(start_from)] if start_from else [])):
        # A damaged checkpoint is reported when it is loaded; the run then falls back to the previous one.
        with contextlib.suppress(CheckpointError):
            found = ckpt.open_checkpoint(path)
            hub, context = dict(found.data.get(ckpt.HUB) or {}), found.context
            break
    chat = next((store.chat for store in corpus.stores if store.chat), None)
    if chat and not hub.get("chat_templates"):
        tokenizer = {**chat["tokenizer"], **hub.get("tokenizer", {})}
        hub = {**hub, "tokenizer": tokenizer, "chat_templates": {"default": chat["template"]}}
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
