"""The common ground of algorithms that learn from steps of their own trajectories."""

from __future__ import annotations

from torch import Tensor

from lit_diffrl.algorithms.base import DiffusionRL
from lit_diffrl.sampling import Kernel, Transition


class TrajectoryRL(DiffusionRL):
    """An algorithm that keeps transitions, and knows the kernel that drew them."""

    kernel: Kernel

    def transition(self, kept: dict[str, Tensor]) -> Transition:
        """The stochastic steps of the transitions of a micro-batch, each at its own noise level."""
        sigmas = self.schedule().sigmas.to(kept["sigma"].device)
        return self.kernel.transition(kept["sigma"], kept["sigma_next"], sigmas, kept["latents"].ndim)
