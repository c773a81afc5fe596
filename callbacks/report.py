"""What a run has achieved, in words, at its end."""

import json
import time
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lit_diffrl.callbacks.comparison import Comparison, compare


class Report(Callback):
    """Closes ``fit`` with the held-out rewards before and after, and with where everything is; also ``report.json``.

    Before is the first complete validation: the one ahead of training with ``num_sanity_val_steps=-1``, whose means
    also go to the loggers, at step 0. It stays in checkpoints, so that a resumed run compares with the same beginning.
    After is the last validation. Prompts and noise are the same in both, so they are compared prompt by prompt.

    The module must hold ``scores`` after a validation: name -> (N,) float64 in the order of the prompts, NaN where not
    scored, with the combined one under ``reward``.

    Attributes:
        baseline: the scores before.
        comparisons: name -> before and after, once ``fit`` has ended.
    """

    def __init__(self) -> None:
        self.baseline: dict[str, Tensor] = {}
        self.comparisons: dict[str, Comparison] = {}
        self._baseline_update = 0
        self._last: dict[str, Tensor] = {}
        self._last_update = 0
        self._start = 0.0
        self._log_dir: str | None = None

    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Start the clock."""
        self._start = time.monotonic()
        self._last = {}
        self._log_dir = trainer.log_dir  # a broadcast, which would come too late at the end

    def on_validation_end(self, trainer: L.Trainer, module: Any) -> None:
        """Take note of the scores."""
        if trainer.state.fn != "fit":
            return
        complete = trainer.num_sanity_val_batches == trainer.num_val_batches
        if trainer.sanity_checking and not complete:
            return
        scores = {name: values.detach().double().cpu() for name, values in module.scores.items()}
        if self.baseline and len(self.baseline["reward"]) != len(scores["reward"]):
            rank_zero_warn(
                f"Report: the validation before training had {len(self.baseline['reward'])} prompts, now there are "
                f"{len(scores['reward'])}; from here on this validation counts as the one before"
            )
            self.baseline = {}
        if not self.baseline:
            self.baseline, self._baseline_update = scores, trainer.global_step
            if trainer.sanity_checking:  # when `self.log` is switched off
                means = {f"val/{name}": values.nanmean().item() for name, values in scores.items()}
                for logger in trainer.loggers:
                    logger.log_metrics(means, step=trainer.global_step)
        else:
            self._last, self._last_update = scores, trainer.global_step

    def on_fit_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Print and write the report."""
        self._conclude(trainer, "")

    def on_exception(self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException) -> None:
        """Report of what there is, if the user ends the run."""
        if isinstance(exception, KeyboardInterrupt) and trainer.state.fn == "fit":
            self._conclude(trainer, ", then interrupted")

    def state_dict(self) -> dict[str, Any]:
        """The scores before training."""
        return {"baseline": self.baseline, "update": self._baseline_update}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the scores before training from the run that is resumed."""
        self.baseline, self._baseline_update = state["baseline"], state["update"]

    # -- inside -------------------------------------------------------------------------------------------------------

    def _conclude(self, trainer: L.Trainer, ending: str) -> None:
        if not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        shared = [name for name in self._last if name in self.baseline]
        self.comparisons = {name: compare(self.baseline[name], self._last[name]) for name in shared}
        run = {
            "rounds": trainer.current_epoch,
            "updates": trainer.global_step,
            "seconds": time.monotonic() - self._start,
        }
        places = self._places(trainer)
        self._write(run, places)
        print("\n" + self.text(run, places, ending), flush=True)

    def text(self, run: dict[str, float], places: dict[str, str], ending: str = "") -> str:
        """The report for people.

        Args:
            run: ``rounds``, ``updates``, ``seconds``.
            places: label -> path or command.
            ending: added to what the run did.
        """
        work = f"{_count(run['rounds'], 'round')}, {_count(run['updates'], 'update')}"
        did = f"{work} in {_duration(run['seconds'])}{ending}."
        lines = [did, *self._verdict(run), *self._table()]
        width = max(map(len, places), default=0)
        return "\n".join([*lines, *(f"{label:<{width}}  {place}" for label, place in places.items())])

    def _verdict(self, run: dict[str, float]) -> list[str]:
        if run["updates"] == 0 and run["rounds"] > 0:
            return ["No sample got a valid reward, so nothing was learnt: see the warnings of the rewards above."]
        if "reward" not in self.comparisons:
            return [
                "No held-out comparison: it takes a validation before (num_sanity_val_steps=-1) and one after training."
            ]
        before = "before training" if self._baseline_update == 0 else f"update {self._baseline_update}"
        after = "the end" if self._last_update == run["updates"] else f"update {self._last_update}"
        return [f"From {before} to {after} the held-out reward {self.comparisons['reward'].words()}."]

    def _table(self) -> list[str]:
        if not self.comparisons:
            return []
        head = ("held-out", "before", "after", "difference ± standard error (ratio)", "prompts")
        rows = [head, *((name, *c.cells()) for name, c in self.comparisons.items())]
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        return ["  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in rows]

    def _places(self, trainer: L.Trainer) -> dict[str, str]:
        places: dict[str, str] = {}
        for saver in trainer.checkpoint_callbacks:
            if isinstance(saver, ModelCheckpoint) and (saver.best_model_path or saver.last_model_path):
                places["checkpoints"] = str(saver.dirpath)
                if saver.best_model_path and saver.best_model_score is not None:
                    score = f"{saver.monitor} {saver.best_model_score.item():.4g}"
                    places["best"] = f"{saver.best_model_path} ({score})"
                if saver.last_model_path:
                    places["last"] = saver.last_model_path
        if self._log_dir is None:
            return places
        folder = Path(self._log_dir)
        if (folder / "images").is_dir():
            places["images"] = str(folder / "images")
        places["report"] = str(folder / "report.json")
        if any(isinstance(logger, TensorBoardLogger) for logger in trainer.loggers):
            places["events"] = str(folder)
            places["look at it"] = f"tensorboard --logdir {folder}"
        return places

    def _write(self, run: dict[str, float], places: dict[str, str]) -> None:
        if self._log_dir is None:
            return
        updates = {"before_update": self._baseline_update, "after_update": self._last_update}
        compared = {name: c.as_dict() for name, c in self.comparisons.items()}
        path = Path(self._log_dir) / "report.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**run, **updates, "held_out": compared, "places": places}, indent=2) + "\n")


def _count(number: float, noun: str) -> str:
    return f"{number:g} {noun}" + ("" if number == 1 else "s")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.3g} s"
