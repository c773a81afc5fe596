"""Means and maxima over a round, exact over micro-batches, ranks and interruptions."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


class Meter:
    """Sums a round's metrics up in float64.

    Lightning's own epoch means are not in a checkpoint written inside an epoch, and count ranks of unequal size
    wrongly.
    """

    def __init__(self) -> None:
        self.sums: dict[str, list[float]] = {}

    def reset(self) -> None:
        """Forget what was summed up."""
        self.sums = {}

    def update(self, name: str, value: Tensor) -> None:
        """Add a scalar or the values of N rows. A name ending in ``_max`` keeps the greatest instead of the mean.

        Without any value the name is noted all the same, so that all ranks know the same ones.
        """
        value = value.detach().cpu().double().flatten()  # not every accelerator has doubles
        keeps_max = name.endswith("_max")
        total, count = self.sums.get(name, [-math.inf if keeps_max else 0.0, 0.0])
        if len(value):
            total = (
                torch.cat([value, value.new_tensor([total])]).max().item() if keeps_max else total + value.sum().item()
            )
        self.sums[name] = [total, count + len(value)]

    def compute(self, gather: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """The means and maxima over all ranks, which must have met the same names; starts anew.

        Args:
            gather: from a tensor of this rank to (ranks, ...) of all.
        """
        names = sorted(self.sums)
        if not names:
            return {}
        table = gather(torch.tensor([self.sums[n] for n in names], dtype=torch.float64)).reshape(-1, len(names), 2)
        self.reset()
        means, maxima = table[..., 0].sum(0) / table[..., 1].sum(0), table[..., 0].amax(0)
        return {n: (maxima if n.endswith("_max") else means)[i].item() for i, n in enumerate(names)}
