"""What all ranks hold, on each of them."""

from typing import Any

from torch import Tensor


def gather(trainer: Any, x: Tensor) -> Tensor:
    """Tensors of one shape from all ranks.

    Args:
        trainer: of the run.
        x: (...) of this rank, on the CPU.

    Returns:
        (ranks, ...) in rank order, on the CPU.
    """
    if trainer.world_size == 1:
        return x[None]
    return trainer.strategy.all_gather(x.to(trainer.lightning_module.device)).reshape(-1, *x.shape).cpu()
