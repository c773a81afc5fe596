"""Progress bars that show the rollout beside the updates of a round."""

import sys
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from lit_diffrl.rollouts import Rollout


class RichRolloutProgressBar(RichProgressBar):
    """Lightning's rich bar, which counts rounds, with a line for the samples that are being drawn."""

    _rollout: Any = None

    @property
    def sanity_check_description(self) -> str:
        """With ``num_sanity_val_steps=-1`` it is the validation before training."""
        return "Before"

    def _get_train_description(self, current_epoch: int) -> str:
        return _round(self.trainer, current_epoch).ljust(len(self.validation_description))

    def get_metrics(self, trainer: L.Trainer, module: L.LightningModule) -> dict[str, Any]:
        """The metrics without the number of the run."""
        return _without_version(super().get_metrics(trainer, module))

    def on_rollout_start(self, trainer: L.Trainer, module: L.LightningModule, total: int) -> None:
        """Show the line."""
        if self.progress is not None:
            self._rollout = self._add_task(total, "Rollout".ljust(len(self.validation_description)))

    def on_rollout_batch_end(self, trainer: L.Trainer, module: L.LightningModule, rollout: Rollout) -> None:
        """Move it on."""
        if self._rollout is not None and self.progress is not None:
            self.progress.advance(self._rollout, len(rollout))
            self.refresh()

    def on_rollout_end(self, trainer: L.Trainer, module: L.LightningModule, rollout: Rollout) -> None:
        """Take it away."""
        if self._rollout is not None and self.progress is not None:
            self.progress.remove_task(self._rollout)
        self._rollout = None

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Stop here, so that what is printed at the end of ``fit`` stands below the bar."""
        super().on_train_end(trainer, module)
        self._stop_progress()

    def on_exception(self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException) -> None:
        """Stop, in a rollout too."""
        self._rollout = None
        super().on_exception(trainer, module, exception)


class TQDMRolloutProgressBar(TQDMProgressBar):
    """Lightning's tqdm bar, which counts rounds, with a second one for the samples that are being drawn."""

    _rollout: Any = None

    @property
    def sanity_check_description(self) -> str:
        """With ``num_sanity_val_steps=-1`` it is the validation before training."""
        return "Before"

    def get_metrics(self, trainer: L.Trainer, module: L.LightningModule) -> dict[str, Any]:
        """The metrics without the number of the run."""
        return _without_version(super().get_metrics(trainer, module))

    def on_train_epoch_start(self, trainer: L.Trainer, *args: Any) -> None:
        """Name the round."""
        super().on_train_epoch_start(trainer, *args)
        self.train_progress_bar.set_description(_round(trainer, trainer.current_epoch))

    def on_rollout_start(self, trainer: L.Trainer, module: L.LightningModule, total: int) -> None:
        """Show the second bar."""
        if not self.is_disabled:
            self._rollout = Tqdm(
                desc="Rollout",
                total=total,
                position=2 * self.process_position + 1,
                leave=False,
                dynamic_ncols=True,
                file=sys.stdout,
            )

    def on_rollout_batch_end(self, trainer: L.Trainer, module: L.LightningModule, rollout: Rollout) -> None:
        """Move it on."""
        if self._rollout is not None:
            self._rollout.update(len(rollout))

    def on_rollout_end(self, trainer: L.Trainer, module: L.LightningModule, rollout: Rollout) -> None:
        """Take it away."""
        self._close()

    def on_exception(self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException) -> None:
        """Take it away, in a rollout too."""
        self._close()
        super().on_exception(trainer, module, exception)

    def _close(self) -> None:
        if self._rollout is not None:
            self._rollout.close()
        self._rollout = None


def _round(trainer: L.Trainer, current_epoch: int) -> str:
    last = trainer.max_epochs
    return f"Round {current_epoch + 1}" + (f"/{last}" if last is not None and last > 0 else "")


def _without_version(metrics: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in metrics.items() if name != "v_num"}
