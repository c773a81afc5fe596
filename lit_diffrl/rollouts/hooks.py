"""The three rollout hooks that stand beside Lightning's own."""

from typing import Any

import lightning as L
from lightning.pytorch import Callback

from lit_diffrl.rollouts.rollout import Rollout


class RolloutCallback(Callback):
    """A callback that also hears of rollouts. Any callback with these methods is called; the base is a convenience."""

    def on_rollout_start(self, trainer: L.Trainer, module: L.LightningModule, total: int) -> None:
        """Before a round: this rank will draw ``total`` samples."""

    def on_rollout_batch_end(self, trainer: L.Trainer, module: L.LightningModule, rollout: Rollout) -> None:
        """After a batch of samples, in training, validation and test alike: where rewards score."""

    def on_rollout_end(self, trainer: L.Trainer, module: L.LightningModule, rollout: Rollout) -> None:
        """After a round: this rank's samples with rewards, advantages and media."""


def call(trainer: L.Trainer, hook: str, *args: Any) -> None:
    """Call ``hook`` on every callback that has it, in the trainer's order, under the trainer's profiler."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if method := getattr(callback, hook, None):
            with trainer.profiler.profile(f"[Callback]{callback.state_key}.{hook}"):  # type: ignore[attr-defined]
                method(trainer, trainer.lightning_module, *args)
