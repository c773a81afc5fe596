"""The grid of noise levels on which a flow is integrated."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Schedule:
    """Noise levels of a sampler with T steps.

    Attributes:
        sigmas: (T+1,) float32, strictly descending within [0, 1], the last one 0. Data is at 0, noise at 1.
        timesteps: (T,) float32, what the network is told at each step, in [0, 1000], never rounded.
    """

    sigmas: Tensor
    timesteps: Tensor

    def __post_init__(self) -> None:
        """Refuse grids on which the formulas are undefined."""
        for name, value in (("sigmas", self.sigmas), ("timesteps", self.timesteps)):
            if value.dtype not in (torch.float32, torch.float64):
                raise ValueError(
                    f"Schedule.{name} has dtype {value.dtype}; noise levels are kept in float32 or float64"
                )
        if self.sigmas.ndim != 1 or len(self.sigmas) != len(self.timesteps) + 1:
            raise ValueError(
                f"Schedule needs T+1 sigmas for T timesteps, got {tuple(self.sigmas.shape)} and "
                f"{tuple(self.timesteps.shape)}"
            )
        if not bool((self.sigmas.diff() < 0).all()) or float(self.sigmas[-1]) != 0 or float(self.sigmas[0]) > 1:
            raise ValueError(f"Schedule.sigmas must descend strictly from at most 1 to 0, got {self.sigmas.tolist()}")

    @property
    def num_steps(self) -> int:
        """T, the number of steps."""
        return len(self.timesteps)
