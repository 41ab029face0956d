"""Checkpoints: sharded safetensors and JSON, no pickle; a checkpoint is complete or does not exist.

    checkpoints/step-00000200/
        state.json                 step, data position, optimizer updates, mesh, configuration, versions
        tokenizer.json             makes the weights usable without the token store
        tensors/shard-*.safetensors  each process's shards of weights, moments and RNG states
        manifest.json              size and BLAKE2 digest of every file above; written last

Tensors are saved under the names and global shapes of the mathematical parameters, never of fused or sharded storage, so any
mesh and layout loads what any other saved. Everything is written into `.step-....tmp`, synced to disk, and renamed at the end:
a folder with the final name is complete. Files that the manifest does not list (.DS_Store, .nfs*, notes) are never opened.

folders.py      names; which checkpoints there are; rotation, setting aside
manifest.py     sizes and digests of files
state.py        state.json, and an opened checkpoint
structure.py    headers of the tensor files, validated: shapes, offsets, shards that cover each tensor exactly
slices.py       this process's slices of weights and moments, and RNG states
snapshot.py     who writes which slice; a copy in host memory that training cannot change
write.py        writes a snapshot, on all processes together
saver.py        the same in the background, one save at a time
last_save.py    the last save of a run: retries, another folder
read.py         verifies and loads
inspect.py      what `boost checkpoint` shows, verifies and repairs
agreement.py    a failure on one process is a failure on all
"""

from boost.train.checkpoint.agreement import run_on_all
from boost.train.checkpoint.folders import (
    BestCheckpoint,
    checkpoint_path,
    complete_checkpoints,
    fallback_folder,
    find_checkpoint,
    incomplete_checkpoints,
    incomplete_warnings,
    read_best,
    rotate,
    step_of,
    supersede,
    trouble_of,
    write_best,
)
from boost.train.checkpoint.last_save import save_with_retries
from boost.train.checkpoint.read import load_training_state, load_weights, require_fits, verify
from boost.train.checkpoint.saver import CheckpointSaver
from boost.train.checkpoint.snapshot import Snapshot, take_snapshot
from boost.train.checkpoint.state import FORMAT, Checkpoint, Position, open_checkpoint
from boost.train.checkpoint.write import SavedCheckpoint, finalize

__all__ = [
    "BestCheckpoint", "Checkpoint", "CheckpointSaver", "FORMAT", "Position", "SavedCheckpoint", "Snapshot", "checkpoint_path",
    "complete_checkpoints", "fallback_folder", "finalize", "find_checkpoint", "incomplete_checkpoints",
    "incomplete_warnings", "load_training_state", "load_weights", "open_checkpoint", "read_best", "require_fits",
    "rotate", "run_on_all", "save_with_retries", "step_of", "supersede", "take_snapshot", "trouble_of",
    "verify", "write_best",
]  # fmt: skip
