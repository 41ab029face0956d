"""Messages between processes of a run with in-step recovery: JSON, so that reading one never executes code."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from boost import errors
from boost.errors import BoostError, TrainingError
from boost.parallel.replicas import Mismatch, ReplicaReport
from boost.train.checkpoint import Position, SavedCheckpoint
from boost.train.evaluate import Evaluation
from boost.train.hooks import RunTrouble

if TYPE_CHECKING:
    from boost.elastic.trainer import ElasticTrainer


# State that a rejoining replica needs in addition to weights and moments.


def state_of(trainer: "ElasticTrainer") -> dict[str, Any]:
    """The trainer's position and the state of its hooks, JSON-serializable."""
    trouble = trainer.trouble
    return {
        "position": dataclasses.asdict(trainer.position),
        "bad_steps": trainer.bad_steps,
        "optimizer": trainer.transfer.transfer_info(),
        "proven_step": trainer.proven_step,
        "rollbacks": vars(trainer.rollbacks),
        "trouble": dataclasses.asdict(trouble) if trouble else None,
        "hooks": {type(hook).__name__: hook.state() for hook in trainer.hooks if not hook.main_only},
    }


def take_state(trainer: "ElasticTrainer", state: dict[str, Any]) -> None:
    """Inverse of `state_of`."""
    trainer.position = Position(**state["position"])
    trainer.bad_steps, trainer.proven_step = state["bad_steps"], state["proven_step"]
    trainer.transfer.load_transfer_info(state["optimizer"])
    vars(trainer.rollbacks).update(state["rollbacks"])
    trainer.trouble = RunTrouble(**state["trouble"]) if state["trouble"] else None
    for hook in trainer.hooks:
        if found := state["hooks"].get(type(hook).__name__):
            hook.take_state(found)


# Results of operations, for processes that are one operation behind.

_KINDS = {kind.__name__: kind for kind in (Evaluation, SavedCheckpoint, ReplicaReport, Mismatch)}


def encode(value: Any) -> Any:
    """Encodes the result of an operation, or the error that it raised."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return {"path": str(value)}
    if isinstance(value, BoostError):
        return {"error": type(value).__name__, "text": str(value)}
    if isinstance(value, list | tuple):
        return {"list" if isinstance(value, list) else "tuple": [encode(each) for each in value]}
    if isinstance(value, dict):
        return {"dict": {key: encode(each) for key, each in value.items()}}
    if type(value).__name__ in _KINDS:
        fields = {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"kind": type(value).__name__, "fields": fields}
    return {"unknown": type(value).__name__}


def decode(value: Any) -> Any:
    """Inverse of `encode`. Raises the error if the operation ended with one."""
    if not isinstance(value, dict):
        return value
    if "path" in value:
        return Path(value["path"])
    if "error" in value:
        known = getattr(errors, value["error"], TrainingError)
        raise known(value["text"])
    if "list" in value:
        return [decode(each) for each in value["list"]]
    if "tuple" in value:
        return tuple(decode(each) for each in value["tuple"])
    if "dict" in value:
        return {key: decode(each) for key, each in value["dict"].items()}
    if "kind" in value:
        return _KINDS[value["kind"]](**{name: decode(each) for name, each in value["fields"].items()})
    raise TrainingError(f"a replica was lost while exchanging {value['unknown']}; resume with --resume auto")
