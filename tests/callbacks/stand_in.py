"""A one-weight module that does what callbacks rely on: its weight counts updates, its samples show its weight."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader

from lit_diffrl.rollouts import Rollout, hooks

PROMPTS = [
    "a red fox",
    "a blue bird with very long feathers that reach across the whole sky",
    "a cat",
    "a dog",
    "a cow",
]


def media(kind="image", n=5, side=8, value=None):
    shape = (n, 3, side, side) if kind == "image" else (n, 3, 3, side, side)
    if value is not None:
        return torch.full(shape, float(value))
    return torch.rand(shape, generator=torch.Generator().manual_seed(0))


def rollout(x=None, **fields):
    x = media() if x is None else x
    return Rollout([PROMPTS[i % len(PROMPTS)] for i in range(len(x))], media=x, **fields)


class Counter(L.LightningModule):
    """Its weight is 0 at first and grows by 1 at every update."""

    sampler_description = "euler, 10 steps, guidance 1"

    def __init__(self, kind="image", dtype=torch.float32, make=None):
        super().__init__()
        self.policy = nn.Module()
        self.policy.kind = kind
        self.weight = nn.Parameter(torch.zeros(1, dtype=dtype))
        self.frozen = nn.Parameter(torch.zeros(1000), requires_grad=False)
        self.make = make or (lambda m: rollout(media(kind)))
        self.seen = []
        self.scores = {}

    def training_step(self, batch, batch_idx):
        return -self.weight.float().sum()

    def configure_optimizers(self):
        return torch.optim.SGD([self.weight], lr=1.0)

    def validation_step(self, batch, batch_idx):
        self.seen.append(self.weight.item())
        self.rollout = self.make(self)
        hooks.call(self.trainer, "on_rollout_batch_end", self.rollout)

    def on_validation_epoch_end(self):
        if "reward" not in self.scores or self.rollout.rewards:
            total = sum(self.rollout.rewards.values(), torch.zeros(len(self.rollout))).double()
            self.scores = {"reward": total, **{k: v.double() for k, v in self.rollout.rewards.items()}}

    test_step, on_test_epoch_end = validation_step, on_validation_epoch_end

    def predict_step(self, batch, batch_idx):
        return self.make(self)


def loader(n=1):
    return DataLoader(torch.arange(n).float(), batch_size=1)


def trainer(tmp_path, *callbacks, **options):
    options = {"logger": False, "enable_checkpointing": False, "num_sanity_val_steps": 0, **options}
    if not any("Bar" in type(c).__name__ for c in callbacks):
        options["enable_progress_bar"] = False
    return L.Trainer(
        accelerator="cpu",
        default_root_dir=tmp_path,
        enable_model_summary=False,
        callbacks=list(callbacks),
        **options,
    )
