"""A callback that notes CPU seconds, rows through the network and held-out scores, and what reads its notes."""

import json
import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import lightning as L
from lightning.pytorch import Callback

SCORES = {"soft": "match/soft", "strict": "match/strict"}


class Clock(Callback):
    """Notes CPU seconds of the process without start-up and evaluation, rows and scores at every validation.

    Args:
        path: a file of JSON lines.
        scores: short name -> name of the held-out score.
        budget: CPU seconds after which the run ends, at the next validation.
    """

    def __init__(self, path: Path, scores: dict[str, str] = SCORES, budget: float | None = None) -> None:
        self.path = Path(path)
        self.scores = scores
        self.budget = budget
        self.evaluating = self.started = self.cpu = self.learning = self.update_phase = 0.0

    def on_sanity_check_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.evaluating = time.process_time()

    def on_sanity_check_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.note(trainer, module)
        self.started = time.process_time()

    def on_rollout_end(self, trainer: L.Trainer, module: L.LightningModule, rollout: object) -> None:
        self.learning = time.process_time()

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.update_phase += time.process_time() - self.learning

    def on_validation_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        now = time.process_time()
        self.cpu += now - self.started
        self.evaluating = now

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            self.note(trainer, module)
            now = time.process_time()
            # Validation stands within the epoch, and so within the update phase of its round.
            self.learning += now - self.evaluating
            self.started = now
            if self.budget is not None and self.cpu >= self.budget:
                trainer.should_stop = True

    def note(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        row = {
            "round": trainer.current_epoch + (not trainer.sanity_checking),
            "cpu": self.cpu,
            "update_phase": self.update_phase,
            "evaluation": time.process_time() - self.evaluating,
            "forward_rows": module.forward_rows,
            "backward_rows": module.backward_rows,
            **{name: module.scores[key].tolist() for name, key in self.scores.items() if key in module.scores},
        }
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def fit(config: str, seed: int, path: Path, runs: Path, *options: str) -> list[dict]:
    """Run ``lit-diffrl fit --config configs/<config>.yaml`` in one thread, unless its notes are there already."""
    if not path.exists():
        part = path.with_suffix(".part").resolve()
        part.unlink(missing_ok=True)
        clock = ["--trainer.callbacks+=clock.Clock", f"--trainer.callbacks.path={part}"]
        command = [sys.executable, "-m", "lit_diffrl", "fit", f"--config=configs/{config}.yaml"]
        command += [f"--seed_everything={seed}", "--omit_callbacks=[SampleLogger]", *clock]
        command += [f"--trainer.default_root_dir={runs}", *options]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-3000:]}")
        part.rename(path)
    return [json.loads(line) for line in path.read_text().splitlines()]


def mean(row: dict, score: str) -> float:
    """The mean held-out score, of the prompts that have one."""
    values = [x for x in row[score] if x == x]
    return sum(values) / len(values)


def reach(rows: list[dict], score: str, target: float, axis: str = "cpu") -> float | None:
    """What was spent until the mean score first reached a target, interpolated between evaluations."""
    points = [(row[axis], mean(row, score)) for row in rows]
    for (t0, s0), (t1, s1) in pairwise(points):
        if s1 >= target:
            return t0 if s0 >= target else t0 + (t1 - t0) * (target - s0) / (s1 - s0)
    return None


def gain(rows: list[dict], score: str) -> tuple[float, float, float, float]:
    """Before, after, difference and its paired standard error over prompts."""
    import numpy as np

    before, after = np.array(rows[0][score]), np.array(rows[-1][score])
    difference = after - before
    return before.mean(), after.mean(), difference.mean(), difference.std(ddof=1) / len(difference) ** 0.5
