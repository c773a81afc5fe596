"""An exponential moving average of the trainable parameters."""

from typing import Any

import lightning as L
import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn


class EMA(Callback):
    """Averages the trainable parameters over updates, and puts the average in their place outside of training.

    ``validate``, ``test`` and ``predict`` see the average, also within ``fit``; before there is one they see the live
    weights. Rollouts and updates always use the live weights. The average is float32 whatever the parameters are, and
    takes memory for the trainable parameters only, twice that while it is swapped in.

    In a checkpoint ``state_dict`` holds the live weights, also if it is written during validation, and the callback's
    state holds the average. (A ``save_weights_only`` checkpoint has no callback
    state; one written in the middle of a validation would hold the average. Lightning's own are written after it.)

    Attributes:
        average: name of a parameter -> its average; empty before ``start_step``.
        swapped_in: whether the module holds the average now.

    Args:
        decay: weight of the past at each update, in [0, 1).
        start_step: updates before the average begins, as a copy of the weights of that moment.
        warmup: use at most ``(1 + n) / (10 + n)`` as the decay of the average's n-th update, so that it forgets its
            beginning sooner.
    """

    def __init__(self, decay: float = 0.99, start_step: int = 0, warmup: bool = False) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay of EMA is {decay}; it must be in [0, 1)")
        if start_step < 0:
            raise ValueError(f"start_step of EMA is {start_step}; it must be at least 0")
        self.decay = decay
        self.start_step = start_step
        self.warmup = warmup
        self.average: dict[str, Tensor] = {}
        self.step = 0
        self.updates = 0
        self._live: dict[str, Tensor] = {}

    @property
    def state_key(self) -> str:
        """One for subclasses too, so that their average is found in checkpoints."""
        return "EMA"  # for subclasses too: where weights are read from a checkpoint, they are looked up under it

    @property
    def swapped_in(self) -> bool:
        """Whether the module holds the average."""
        return bool(self._live)

    # -- averaging ----------------------------------------------------------------------------------------------------

    def on_sanity_check_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Begin, or lay out what the checkpoint brought."""
        self._begin(trainer, module)

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Begin, or lay out what the checkpoint brought; strategies that shard restore callbacks only just before."""
        self._begin(trainer, module)
        self.step = trainer.global_step

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        """Average once an update."""
        if trainer.global_step == self.step:  # still accumulating
            return
        self.step = trainer.global_step
        if not self.average:
            self._begin(trainer, module)
            return
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates)) if self.warmup else self.decay
        live = _trainable(module)
        averages = [self.average[k] for k in live]
        get_ema_multi_avg_fn(decay)(averages, [p.to(a.dtype) for p, a in zip(live.values(), averages)], None)
        self.updates += 1

    def _begin(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        live = _trainable(module)
        if self.average:
            self._check(live)
            self.average = {k: _laid_out_as(p, self.average[k]) for k, p in live.items()}
        elif trainer.global_step >= self.start_step:
            self.average = {k: p.detach().to(torch.float32, copy=True) for k, p in live.items()}

    def _check(self, live: dict[str, Tensor]) -> None:
        if unlike := sorted(set(live) ^ set(self.average)):
            raise ValueError(
                f"EMA: the average of the checkpoint has {len(self.average)} tensors, the model trains {len(live)}; "
                f"{len(unlike)} are not in both, the first being {unlike[0]}. Leave EMA out, or use the same model"
            )

    # -- swapping -----------------------------------------------------------------------------------------------------

    def _swap_in(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self.average:
            return
        live = _trainable(pl_module)
        self._check(live)
        self._live = {k: p.detach().clone() for k, p in live.items()}
        for k, p in live.items():
            p.copy_(_laid_out_as(p, self.average[k]))

    def _swap_out(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        live = _trainable(pl_module) if self._live else {}
        with torch.no_grad():
            for k, p in live.items():
                p.copy_(self._live[k])
        self._live = {}

    on_validation_epoch_start = on_test_epoch_start = on_predict_epoch_start = _swap_in
    on_validation_epoch_end = on_test_epoch_end = on_predict_epoch_end = _swap_out

    def on_exception(self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException) -> None:
        """Put the live weights back."""
        self._swap_out(trainer, module)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The average, whole on every rank: a sharded tensor would be stored as rank 0's shard alone."""
        return {"average": {k: _whole(v) for k, v in self.average.items()}, "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up an average again; it is laid out like the parameters once these are in their place."""
        self.average, self.updates = state["average"], state["updates"]

    def on_save_checkpoint(self, trainer: L.Trainer, module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keep the live weights in ``state_dict`` while the average is swapped in."""
        weights = checkpoint["state_dict"]
        for k, held in self._live.items():
            whole = _whole(held)  # a collective, hence also on ranks that write nothing
            if k in weights:
                saved = weights[k]
                weights[k] = (held if isinstance(saved, DTensor) else whole).to(saved.device)


def _trainable(module: L.LightningModule) -> dict[str, Tensor]:
    for m in module.modules():
        if isinstance(m, FSDPModule):  # whose root stays whole after a forward without gradients
            m.reshard()
    return {k: p.data for k, p in module.named_parameters() if p.requires_grad}


def _laid_out_as(p: Tensor, x: Tensor) -> Tensor:
    """``x`` in float32, placed and sharded as the parameter ``p`` is."""
    x = x.to(p.device, torch.float32)
    if isinstance(p, DTensor) and not isinstance(x, DTensor):
        return distribute_tensor(x, p.device_mesh, p.placements)
    return x


def _whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x
