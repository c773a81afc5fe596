"""Arithmetic of rows that several losses share."""

import torch
from torch import Tensor


def row_mean(x: Tensor) -> Tensor:
    """Mean over all but the first dimension."""
    return x.flatten(1).mean(1)


def clipped_surrogate(ratio: Tensor, advantage: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """``max(-A r, -A clip(r, 1 - c, 1 + c))`` of policy gradients (PPO).

    Args:
        ratio: (N,) r, of the likelihoods now and when the row was drawn.
        advantage: (N,) A.
        clip: c.

    Returns:
        The loss (N,), and (N,) 1 where the ratio has left the range, 0 elsewhere.
    """
    clipped = ratio.clamp(1 - clip, 1 + clip)
    return torch.maximum(-advantage * ratio, -advantage * clipped), (clipped != ratio).float()
