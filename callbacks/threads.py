"""How many CPU threads a run uses."""

import lightning as L
import torch
from lightning.pytorch import Callback


class Threads(Callback):
    """Sets the number of CPU threads of torch for a run, and puts the old one back after it.

    A model of a few million weights gains little from a second thread, and on a machine that is busy with other things
    the threads wait for each other: a round can take twenty times as long.

    Args:
        num_threads: threads of each process.
    """

    def __init__(self, num_threads: int = 1) -> None:
        if num_threads < 1:
            raise ValueError(f"num_threads of Threads is {num_threads}; it must be at least 1")
        self.num_threads = num_threads
        self._before: int | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Set it."""
        if self._before is None:
            self._before = torch.get_num_threads()
        torch.set_num_threads(self.num_threads)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Put the old number back."""
        if self._before is not None:
            torch.set_num_threads(self._before)
            self._before = None
