"""A run that is stopped and resumed is the run that was never stopped, bit for bit."""

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger

from lit_diffrl.callbacks import EMA
from lit_diffrl.policies import LoRA
from tests import helpers

ROUNDS, UPDATES = 3, 2
SIZES = dict(group_size=2, updates_per_round=UPDATES, batch_size=3)


class Memory(DummyLogger):
    """Keeps what is logged."""

    def __init__(self):
        super().__init__()
        self.rows = {}

    def log_metrics(self, metrics, step=None):
        self.rows.setdefault(step, {}).update({k: v for k, v in metrics.items() if not k.startswith("time/")})


def merged(*parts):
    """The rows of a run and of those that take it up."""
    rows = {}
    for part in parts:
        for step, row in part.items():
            rows[step] = rows.get(step, {}) | row
    return rows


class Stop(Exception):
    pass


class StopAfter(Callback):
    """Saves a checkpoint after an update, or at the end of a round, then ends the run as a crash would."""

    def __init__(self, path, update=None, round_=None):
        self.path, self.update, self.round = path, update, round_

    def on_train_batch_end(self, trainer, module, *_):
        if trainer.global_step == self.update:
            trainer.save_checkpoint(self.path)
            raise Stop

    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch == self.round:
            raise Stop


def run(name, folder, prompts, lora, *callbacks, ckpt=None, seed=0):
    torch.manual_seed(seed)
    module, ema, memory = helpers.algorithm(name, folder, lora), EMA(0.8), Memory()
    saves = any(isinstance(c, ModelCheckpoint) for c in callbacks)
    options = dict(max_epochs=ROUNDS, logger=memory, limit_val_batches=None)
    trainer = helpers.trainer(ema, *callbacks, enable_checkpointing=saves, **options)
    data = helpers.data(prompts, **SIZES)
    data.val_prompts = data.val_prompts[:2]
    try:
        trainer.fit(module, datamodule=data, ckpt_path=ckpt)
    except Stop:
        return None, memory.rows
    moments = trainer.optimizers[0].state_dict()["state"]
    return (helpers.weights(module), moments, ema.average), memory.rows


def equal(a, b):
    assert a.keys() == b.keys()
    for key in a:
        if isinstance(a[key], dict):
            equal(a[key], b[key])
        elif isinstance(a[key], torch.Tensor):
            assert torch.equal(a[key], b[key]), key
        else:
            assert a[key] == b[key] or a[key] != a[key], key


@pytest.mark.parametrize("lora", [None, LoRA(rank=2, alpha=4, dropout=0.2)], ids=["full", "lora"])
@pytest.mark.parametrize("name", list(helpers.ALGORITHMS))
def test_resume_at_and_inside_a_round_is_exact(sd35_folder, prompt_file, tmp_path, name, lora):
    straight, rows = run(name, sd35_folder, prompt_file, lora)
    inside, end = tmp_path / "inside.ckpt", tmp_path / "end.ckpt"
    at_end = ModelCheckpoint(tmp_path, "end", every_n_epochs=1, enable_version_counter=False)
    # Stopped inside the second round, taken up from there, and stopped and taken up again after that round.
    stopped, first = run(name, sd35_folder, prompt_file, lora, StopAfter(inside, update=3))
    again, second = run(name, sd35_folder, prompt_file, lora, at_end, StopAfter(end, round_=2), ckpt=inside, seed=98)
    assert stopped is None and again is None
    resumed, third = run(name, sd35_folder, prompt_file, lora, ckpt=end, seed=99)
    for a, b in zip(straight, resumed):
        equal(a, b)
    equal(rows, merged(first, second, third))


def test_a_checkpoint_of_another_model_is_refused(sd35_folder, prompt_file, tmp_path):
    path = tmp_path / "x.ckpt"
    run("rvm_ema", sd35_folder, prompt_file, LoRA(rank=2, alpha=4), StopAfter(path, update=2))
    with pytest.raises(ValueError, match="does not fit the model"):
        run("rvm_ema", sd35_folder, prompt_file, None, ckpt=path)
    with pytest.raises(ValueError, match="does not fit the model"):
        run("nft", sd35_folder, prompt_file, LoRA(rank=2, alpha=4), ckpt=path)


def test_a_checkpoint_holds_what_is_trained_and_nothing_else(sd35_folder, prompt_file, tmp_path):
    path = tmp_path / "x.ckpt"
    run("nft", sd35_folder, prompt_file, LoRA(rank=2, alpha=4), StopAfter(path, update=2))
    state = torch.load(path, weights_only=True)["state_dict"]
    assert all(".lora_" in k for k in state)
    assert any(".old." in k for k in state) and any(".default." in k for k in state)


@pytest.mark.parametrize("changed", [{"batch_size": 2}, {"group_size": 4}])
def test_a_half_learnt_round_is_not_taken_up_with_other_batches(sd35_folder, prompt_file, tmp_path, changed):
    path = tmp_path / "inside.ckpt"
    run("flow_grpo", sd35_folder, prompt_file, None, StopAfter(path, update=1))
    module = helpers.algorithm("flow_grpo", sd35_folder)
    data = helpers.data(prompt_file, **(SIZES | changed))
    name, value = next(iter(changed.items()))
    with pytest.raises(ValueError, match=f"{name} {value} instead of"):
        helpers.trainer(EMA(0.8)).fit(module, datamodule=data, ckpt_path=path)
