"""Run as a script: averages over two FSDP2 ranks, swapped in, saved within validation, resumed; prints them."""

import sys
import warnings
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard

from lit_diffrl.callbacks import EMA
from tests.callbacks.stand_in import loader
from tests.callbacks.test_ema import SaveInValidation


class Sharded(L.LightningModule):
    """Four weights over two ranks, 0 at first, each growing by 1 at every update."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(1, 4, bias=False)
        nn.init.zeros_(self.net.weight)
        self.seen = []

    def configure_model(self):
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, batch_idx):
        return -self.net(torch.ones(1, 1)).sum()

    def validation_step(self, batch, batch_idx):
        self.seen.append(self.net(torch.ones(1, 1)).tolist()[0])

    def configure_optimizers(self):
        # Lightning cannot restore a sharded optimiser that has no state, hence the momentum.
        return torch.optim.SGD(self.parameters(), lr=1.0, momentum=1e-9)


def run(root, updates, ckpt=None, callbacks=()):
    ema, module = EMA(0.9), Sharded()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ModelParallelStrategy(2, 1, save_distributed_checkpoint=False),
        max_steps=updates,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=1,
        default_root_dir=root,
        callbacks=[ema, *callbacks],
    )
    trainer.fit(module, loader(6), loader(2), ckpt_path=ckpt)
    whole = {k: v.full_tensor() for k, v in ema.average.items()}
    return trainer.global_rank, module.seen, whole["net.weight"].flatten().tolist()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    root = Path(sys.argv[1])
    rank, seen, average = run(root, 3, callbacks=[SaveInValidation(root / "mid.ckpt")])
    saved = torch.load(root / "mid.ckpt", weights_only=True)
    live = saved["state_dict"]["net.weight"].flatten().tolist()
    stored = saved["callbacks"]["EMA"]["average"]["net.weight"].flatten().tolist()
    _, _, whole = run(root, 5)
    _, _, resumed = run(root, 5, ckpt=root / "mid.ckpt")
    if rank == 0:
        print({"seen": seen, "average": average, "live": live, "stored": stored, "resumed": whole == resumed})
