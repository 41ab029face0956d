"""Checkpoints: sharded safetensors and JSON, no pickle. Saves are atomic.

    checkpoints/step-00000200/
        state.json                 step, data position, optimizer updates, mesh, configuration, versions
        tokenizer.json             tokenizer, so that the weights can be used without the token store
        tensors/shard-*.safetensors  each process's slices of weights, moments and RNG states
        manifest.json              size and BLAKE2 digest of every file above; written last

Tensors are saved with the names and global shapes of the model's parameters, independent of fusing and sharding, so a checkpoint
can be loaded on any mesh and layout. Everything is written to `.step-....tmp`, synced to disk, and renamed at the end, so a folder
with the final name is complete. Files that the manifest does not list (.DS_Store, .nfs*, notes) are never opened.

folders.py      names, listing, rotation, setting aside
files.py        manifest, state.json, headers of tensor files: schemas and checks; an opened checkpoint
slices.py       this process's slices of weights, moments and RNG states, and which of them it writes
write.py        writes a checkpoint, on all processes together
saver.py        foreground and background saves, one at a time; the last save of a run, with retries and a fallback
read.py         verifies, loads, inspects
agreement.py    propagates a failure on one process to all
"""

from boost.train.checkpoint.agreement import run_on_all
from boost.train.checkpoint.files import FORMAT, HUB, Checkpoint, Position, open_checkpoint
from boost.train.checkpoint.folders import (
    BestCheckpoint,
    checkpoint_path,
    complete_checkpoints,
    fallback_folder,
    find_checkpoint,
    incomplete_warnings,
    marks_of,
    read_best,
    rotate,
    step_of,
    supersede,
    write_best,
)
from boost.train.checkpoint.read import load_training_state, load_weights, require_fits, verify
from boost.train.checkpoint.saver import CheckpointSaver, save_with_retries
from boost.train.checkpoint.write import SavedCheckpoint, Snapshot, finalize

__all__ = [
    "BestCheckpoint", "Checkpoint", "CheckpointSaver", "FORMAT", "HUB", "Position", "SavedCheckpoint", "Snapshot",
    "checkpoint_path", "complete_checkpoints", "fallback_folder", "finalize", "find_checkpoint",
    "incomplete_warnings", "load_training_state", "load_weights", "marks_of", "open_checkpoint", "read_best",
    "require_fits", "rotate", "run_on_all", "save_with_retries", "step_of", "supersede",
    "verify", "write_best",
]  # fmt: skip
