r"""DiffusionNFT: negative-aware fine-tuning on the forward process (arXiv 2509.16117).

Rewards become optimality probabilities ``r = 1/2 + A / (2 clip)`` in [0, 1], and two velocities that mirror each other
at the old policy are regressed on the samples, one with the weight of being good, one of being bad:

    v+ = (1 - beta) v_old + beta v_theta,    v- = (1 + beta) v_old - beta v_theta
    L = r |v+ - v|^2 + (1 - r) |v- - v|^2,    v = eps - x_0.

The old policy, which also draws the rollouts, follows the one in training with a lag.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from lit_diffrl.algorithms.matching import MatchingRL, Noised, Times, draw_seeds
from lit_diffrl.algorithms.rows import row_mean
from lit_diffrl.algorithms.settings import one_of
from lit_diffrl.policies.base import Policy
from lit_diffrl.rollouts import Rollout
from lit_diffrl.rollouts.advantages import Std
from lit_diffrl.sampling.noise import TRAIN_TIME, generator, rand

# The published lags: flat for so many updates, then a ramp of so much an update, up to a cap.
LAGS = {"copy": (0, 0.0, 0.0), "ramp": (0, 0.001, 0.5), "late_ramp": (75, 0.0075, 0.999)}

Lag = Literal["copy", "ramp", "late_ramp"]


class DiffusionNFT(MatchingRL):
    """Negative-aware fine-tuning.

    Args:
        policy: the model to train.
        beta: how far the implicit policies stand from the old one; 1 or 0.1 in the paper.
        lag: decay of the old policy after each round: a number, or a published schedule over updates: ``copy`` (0),
            ``ramp`` (0.001 an update up to 0.5; type 1) or ``late_ramp`` (0 for 75 updates, then 0.0075 an update up to
            0.999; type 2).
        kl: weight of ``|v_theta - v_reference|^2``; 0 costs no forward.
        times: noise levels to train at: the sampler's ``grid`` without its last level, or ``uniform`` on (0, 1).
        draws_per_sample: noise draws of each sample in a round; all levels of the grid where omitted (1 for
            ``uniform``).
        adaptive: divide each branch by its own mean error in data space, as the released code does; plain velocity
            space otherwise, where the loss equals that of RVM with the old policy as anchor.
        kwargs: see :class:`~lit_diffrl.algorithms.base.DiffusionRL`. Advantages are scaled by the global deviation by
            default, as in the released code.
    """

    behaviour = "old"

    def __init__(
        self,
        policy: Policy,
        beta: float = 1.0,
        lag: float | Lag = "ramp",
        kl: float = 0.0,
        times: Times = "grid",
        draws_per_sample: int | None = None,
        adaptive: bool = True,
        advantage_std: Std = "global",
        **kwargs: Any,
    ) -> None:
        super().__init__(policy, advantage_std=advantage_std, **kwargs)
        one_of("times", times, Times)
        if isinstance(lag, str):
            one_of("lag", lag, Lag)
        if beta <= 0 or kl < 0:
            raise ValueError(f"model.beta is {beta} and model.kl is {kl}; beta must be above 0, kl at least 0")
        if isinstance(lag, float | int) and not 0 <= lag < 1:
            raise ValueError(f"model.lag is {lag}; as a number it must lie in [0, 1)")
        most = max(self.num_steps - 1, 1)
        self.beta = beta
        self.lag = lag
        self.kl = kl
        self.times = times
        self.draws_per_sample = self.draws(draws_per_sample, most if times == "grid" else 1, times, most)
        self.adaptive = adaptive

    @property
    def rows_per_sample(self) -> int:  # noqa: D102
        return self.draws_per_sample

    @property
    def role_names(self) -> list[str]:  # noqa: D102
        return ["old", *(["reference"] if self.kl > 0 else [])]

    def on_round_start(self, round_: int) -> None:  # noqa: D102
        # Here, not after the round: a checkpoint of its end then resumes before this step wherever it was written.
        if round_ > 0:
            self.policy.roles.follow("old", lag(self.lag, self.global_step))

    def levels(self, batch: Rollout) -> Tensor:
        """(N,) the noise level of each row: a uniform draw, or each sample's own random order of the grid."""
        if self.times == "uniform":
            return rand(draw_seeds(batch), TRAIN_TIME)
        grid = self.schedule().sigmas[: max(self.num_steps - 1, 1)]
        orders = [torch.randperm(len(grid), generator=generator(s, TRAIN_TIME)) for s in batch.seeds.tolist()]
        return torch.stack([grid[order[draw]] for order, draw in zip(orders, batch.draws.tolist())])

    def loss(self, batch: Rollout) -> tuple[Tensor, dict[str, Tensor]]:  # noqa: D102
        r = (batch.advantages / self.advantage_clip / 2 + 0.5).clamp(0, 1)
        x = self.renoise(batch, self.levels(batch))
        old = self.frozen_velocity("old", x.latents, x.timestep, batch.prompts)
        velocity = self.velocity(x.latents, x.timestep, batch.prompts)
        good = self.error((1 - self.beta) * old + self.beta * velocity, x)
        bad = self.error((1 + self.beta) * old - self.beta * velocity, x)
        loss = (r * good + (1 - r) * bad) * self.advantage_clip / self.beta
        metrics = {"moved": row_mean((velocity - old) ** 2), "optimality": r}
        if self.kl > 0:
            reference = self.frozen_velocity("reference", x.latents, x.timestep, batch.prompts)
            metrics["kl"] = row_mean((velocity - reference) ** 2)
            loss = loss + self.kl * metrics["kl"]
        return loss, metrics

    def error(self, velocity: Tensor, x: Noised) -> Tensor:
        """(N,) mean squared error of a branch, in data space with its own scale (adaptive) or of the velocity."""
        difference = velocity - x.target
        if not self.adaptive:
            return row_mean(difference**2)
        # The error of x_0 = x_t - t v is -t times that of v.
        in_data = x.level.view(-1, *[1] * (difference.ndim - 1)) * difference
        return row_mean(in_data**2) / row_mean(in_data.abs()).detach().clamp(min=1e-5)


def lag(schedule: float | str, update: int) -> float:
    """The decay of the old policy after so many updates."""
    if isinstance(schedule, str):
        flat, rate, cap = LAGS[schedule]
        return min((update - flat) * rate, cap) if update >= flat else 0.0
    return float(schedule)
