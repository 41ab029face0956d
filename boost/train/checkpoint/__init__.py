"""Checkpoints: sharded safetensors and JSON, no pickle. Saves are atomic.

    checkpoints/step-00000200/
        state.json                 step, data position, optimizer updates, mesh, configuration, versions
        tokenizer.json             tokenizer, so that the weights can be used without the token store
        tensors/shard-*.safetensors  each process's slices of the weights, moments and RNG states
        manifest.json              size and SHA-256 digest of each file above; written last

Tensors are saved with the names and global shapes of the model's parameters, independent of fusing and sharding, so a checkpoint
can be loaded on any mesh and with any layout. Everything is written to `.step-....tmp`, synced to disk, and renamed at the end,
so a folder with the final name is complete. Files that the manifest does not list (.DS_Store, .nfs*, notes) are never opened.

Modules, in the order in which a save and then a load use them:

write.py      writes each process's files, in the foreground or the background
commit.py     temporary folder, manifest, rename, removal of earlier checkpoints
verify.py     checks that a folder is a complete, undamaged checkpoint
load.py       finds and opens a checkpoint; reads its weights, optimizer state and position
reshard.py    slices of parameters on any mesh: which process holds and writes each one
"""

from boost.train.checkpoint.commit import (
    BestCheckpoint,
    checkpoint_path,
    complete_checkpoints,
    marks_of,
    read_best,
    rotate,
    step_of,
    supersede,
    write_best,
)
from boost.train.checkpoint.load import (
    HUB,
    PREFIX,
    TRAITS,
    Checkpoint,
    WeightReader,
    find_checkpoint,
    folder_identity,
    incomplete_warnings,
    load_training_state,
    load_weights,
    open_checkpoint,
    open_on_all,
    read_checkpoint,
    require_fits,
)
from boost.train.checkpoint.verify import Position, verifying
from boost.train.checkpoint.write import (
    CheckpointSaver,
    SavedCheckpoint,
    fallback_folder,
    finish_weights,
)

__all__ = [
    "BestCheckpoint", "Checkpoint", "CheckpointSaver", "HUB", "PREFIX", "Position", "SavedCheckpoint", "TRAITS",
    "WeightReader",
    "checkpoint_path", "complete_checkpoints", "fallback_folder", "find_checkpoint", "finish_weights", "folder_identity",
    "incomplete_warnings", "load_training_state", "load_weights", "marks_of", "open_checkpoint",
    "open_on_all", "read_best", "read_checkpoint", "require_fits", "rotate", "step_of", "supersede",
    "verifying", "write_best",
]  # fmt: skip
