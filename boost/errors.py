"""What goes wrong for a user, as exceptions whose text is one line: the field, its value, and the way out.

The command line prints the text of a `BoostError` and exits with its `exit_code`; a traceback is shown with `--debug`
only. Anything that is not a `BoostError` is a defect of ours and keeps its traceback.
"""


class BoostError(Exception):
    """Base of every error that a user can mend. The message is one line that says how."""

    exit_code = 2


class ConfigError(BoostError):
    """A key that does not exist, a value of the wrong type, or a value that does not fit the others."""


class DataError(BoostError):
    """A corpus, tokenizer or token store that is missing, empty, damaged or does not fit the model."""


class CheckpointError(BoostError):
    """A checkpoint that is missing, incomplete, damaged, or belongs to another model."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint whose files are not what was saved; an earlier one may do."""


class StorageError(BoostError):
    """The disk is full, or a path cannot be written."""


class TrainingError(BoostError):
    """Training cannot go on: the loss is not finite, or a process was lost."""

    exit_code = 3


class NonFiniteError(TrainingError):
    """A weight or an optimizer moment that is not finite: it is never saved, and earlier checkpoints stay."""


class HangError(TrainingError):
    """A process of the run does not respond, or does not reach the collective in which the others wait."""


class StoppedError(BoostError):
    """A stop signal arrived before the first step; the message is its name. Nothing was trained, nothing is lost."""

    exit_code = 0


class MeasurementError(BoostError):
    """What was timed means nothing, or two results cannot be compared."""

    exit_code = 3
