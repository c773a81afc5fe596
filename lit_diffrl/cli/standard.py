"""The callbacks that a command has without being asked: each can be replaced, and each can be left out."""

from collections.abc import Callable
from typing import Any, Literal

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BasePredictionWriter, Checkpoint, ModelCheckpoint, ProgressBar

from lit_diffrl.callbacks import Report, RichRolloutProgressBar, SampleLogger, SampleWriter

Name = Literal["RichRolloutProgressBar", "Report", "SampleLogger", "ModelCheckpoint", "SampleWriter"]


def _last_round() -> ModelCheckpoint:
    """At round boundaries: a checkpoint from within a round would carry the round's samples."""
    return ModelCheckpoint(save_last=True, every_n_epochs=1, save_on_train_epoch_end=True)


# Which of the user's callbacks take the place of one of these, and how it is made.
_STANDARD: dict[Name, tuple[type, Callable[[], Callback]]] = {
    "RichRolloutProgressBar": (ProgressBar, RichRolloutProgressBar),
    "Report": (Report, Report),
    "SampleLogger": (SampleLogger, SampleLogger),
    "ModelCheckpoint": (Checkpoint, _last_round),
    "SampleWriter": (BasePredictionWriter, SampleWriter),
}
# Lightning's own switches, off for a user who wants neither ours nor theirs.
_SWITCHES: dict[Name, str] = {
    "RichRolloutProgressBar": "enable_progress_bar",
    "ModelCheckpoint": "enable_checkpointing",
}
_BY_COMMAND: dict[str, list[Name]] = {
    "fit": ["RichRolloutProgressBar", "Report", "SampleLogger", "ModelCheckpoint"],
    "validate": ["RichRolloutProgressBar", "Report", "SampleLogger"],
    "test": ["RichRolloutProgressBar", "Report", "SampleLogger"],
    "predict": ["RichRolloutProgressBar", "SampleWriter"],
}


def complete(trainer: dict[str, Any], command: str, omit: list[Name]) -> None:
    """Add the standard callbacks of a command to the settings of a trainer.

    Args:
        trainer: its settings, in which ``callbacks`` is a list.
        command: one of Lightning's.
        omit: those that are not wanted. Lightning's own progress bar and checkpoints do not come in their place.
    """
    own: list[Callback] = trainer["callbacks"]
    absent = [name for name in _STANDARD if not any(isinstance(c, _STANDARD[name][0]) for c in own)]
    for name, switch in _SWITCHES.items():
        if name in omit and name in absent:
            trainer[switch] = False
        if trainer[switch] is False:
            absent = [n for n in absent if n != name]
    own.extend(_STANDARD[name][1]() for name in _BY_COMMAND[command] if name in absent and name not in omit)
