"""The common ground of algorithms that learn from clean samples: noise them again, and match velocities."""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor

from lit_diffrl.algorithms.base import DiffusionRL
from lit_diffrl.rollouts import Rollout
from lit_diffrl.sampling.noise import TRAIN_NOISE, fold, randn

Times = Literal["grid", "uniform"]


class Noised(NamedTuple):
    """Clean samples at a noise level.

    Attributes:
        latents: (N, ...) ``x_t = (1 - t) x_0 + t eps``.
        target: (N, ...) the conditional velocity ``eps - x_0``.
        level: (N,) t.
        timestep: (N,) what the network is told, ``1000 t``.
    """

    latents: Tensor
    target: Tensor
    level: Tensor
    timestep: Tensor


class MatchingRL(DiffusionRL):
    """An algorithm without trajectories: deterministic rollouts, of which the final latents are kept."""

    keeps_latents = True

    def draws(self, wanted: int | None, default: int, times: Times, levels: int) -> int:
        """The noise draws of a sample in a round.

        Args:
            wanted: the setting.
            default: where it is omitted.
            times: where the noise levels come from.
            levels: of the grid.

        Raises:
            ValueError: for none, or for more than the grid has levels.
        """
        draws = default if wanted is None else wanted
        if draws < 1 or (times == "grid" and draws > levels):
            raise ValueError(
                f"model.draws_per_sample is {draws}; it must be at least 1, and at most {levels}, the levels of "
                f"model.num_steps {self.num_steps}, with model.times 'grid'"
            )
        return draws

    def renoise(self, batch: Rollout, level: Tensor) -> Noised:
        """Noise each row's clean sample to its level, with noise that depends on the sample and the draw alone.

        Args:
            batch: a micro-batch, whose ``draws`` number the noise draws of a sample.
            level: (N,) t in (0, 1].
        """
        x_0, t = batch.latents, level.to(batch.latents)
        seeds = draw_seeds(batch)
        noise = self.policy.prepare_latents(
            randn(self.policy.latent_shape(self.size), seeds, TRAIN_NOISE), self.size
        ).to(x_0)
        column = t.view(-1, *[1] * (x_0.ndim - 1))
        return Noised((1 - column) * x_0 + column * noise, noise - x_0, t, 1000 * t)


def draw_seeds(batch: Rollout) -> list[int]:
    """The seed of each row's own draws."""
    return [fold(seed, draw) for seed, draw in zip(batch.seeds.tolist(), batch.draws.tolist())]
