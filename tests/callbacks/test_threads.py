"""The number of CPU threads of a run."""

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from lit_diffrl.callbacks import Threads


class Look(L.pytorch.Callback):
    def on_train_start(self, trainer, module):
        self.seen = torch.get_num_threads()


def test_a_run_has_its_number_of_threads_and_the_process_gets_its_own_back():
    before, look = torch.get_num_threads(), Look()
    module = BoringModel()
    trainer = L.Trainer(
        max_steps=1, accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=[Threads(3), look]
    )
    trainer.fit(module)
    assert look.seen == 3
    assert torch.get_num_threads() == before


def test_no_threads_are_refused():
    with pytest.raises(ValueError, match="num_threads of Threads is 0"):
        Threads(0)
