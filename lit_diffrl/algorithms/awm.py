r"""AWM: advantage-weighted matching (arXiv 2509.25050).

The negative flow-matching error of a clean sample, noised again, stands for its log-likelihood, and enters the clipped
ratio of policy gradients:

    log p = -w(l, t),   l = mean |v_theta(x_t) - v|^2,   v = eps - x_0
    L = max(-A r, -A clip(r, 1 - c, 1 + c)) + beta_kl |v_theta - v_ref|^2 + beta_ema |v_theta - v_ema|^2,
    r = p_theta / p_old at the same t and eps.

With one update a round the policy in training drew it, the ratio is 1, and only its gradient counts.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from lit_diffrl.algorithms.matching import MatchingRL, Noised, Times, draw_seeds
from lit_diffrl.algorithms.rows import clipped_surrogate, row_mean
from lit_diffrl.algorithms.settings import one_of
from lit_diffrl.policies.base import Policy
from lit_diffrl.rollouts import Rollout
from lit_diffrl.rollouts.advantages import Std
from lit_diffrl.sampling.noise import TRAIN_TIME, generator, rand

Weighting = Literal["uniform", "t", "t2", "huber", "ghuber"]
_TINY = 1e-10


class AWM(MatchingRL):
    """Advantage-weighted matching.

    Args:
        policy: the model to train.
        weighting: w, how the error becomes a likelihood: ``uniform`` (l), ``t`` (t l), ``t2`` (t^2 l), ``huber``
            (t sqrt l) or ``ghuber`` (t l^p / p).
        power: p of ``ghuber``.
        advantage_max: advantages are scaled from ``advantage_clip`` to this magnitude.
        clip: c; 1 in the released configs, where it hardly acts.
        kl: beta_kl, weight of the distance to the model before training; 0 costs no forward.
        ema_beta: beta_ema, weight of the distance to an average of the policy; 0 costs no forward.
        ema_rate: the average's decay is ``ema_rate`` times the number of updates, and at most ``ema_decay``; it follows
            once a round.
        ema_decay: greatest decay of the average.
        off_policy: compare with the policy that drew the round, by a further forward, so that ratio and clip act where
            a round has several updates; from the second one on, so with one update a round it does nothing.
        times: noise levels to train at: the sampler's ``grid`` without its first and last level, or ``uniform`` on
            (0, 1).
        draws_per_sample: noise draws of each sample in a round, stratified over the grid; 6 in the released configs,
            or as many as the grid has.
        kwargs: see :class:`~lit_diffrl.algorithms.base.DiffusionRL`. Advantages are scaled by the global deviation by
            default, as in the released code.
    """

    has_likelihood_ratio = True

    def __init__(
        self,
        policy: Policy,
        weighting: Weighting = "ghuber",
        power: float = 0.25,
        advantage_max: float = 1.0,
        clip: float = 1.0,
        kl: float = 0.0,
        ema_beta: float = 1.0,
        ema_rate: float = 0.001,
        ema_decay: float = 0.3,
        off_policy: bool = False,
        times: Times = "grid",
        draws_per_sample: int | None = None,
        advantage_std: Std = "global",
        **kwargs: Any,
    ) -> None:
        super().__init__(policy, advantage_std=advantage_std, **kwargs)
        one_of("weighting", weighting, Weighting)
        one_of("times", times, Times)
        positive = {"power": power, "advantage_max": advantage_max, "clip": clip}
        for name, value in positive.items():
            if value <= 0:
                raise ValueError(f"model.{name} is {value}; it must be above 0")
        if kl < 0 or ema_beta < 0 or ema_rate < 0 or not 0 <= ema_decay < 1:
            raise ValueError(
                f"model.kl is {kl}, model.ema_beta {ema_beta}, model.ema_rate {ema_rate} and model.ema_decay "
                f"{ema_decay}; they must be at least 0, and the last below 1"
            )
        levels = self.num_steps - 2
        if times == "grid" and levels < 1:
            raise ValueError(
                f"model.num_steps is {self.num_steps}; model.times 'grid' leaves out the first and the last level, so "
                "it must be at least 3"
            )
        self.weighting: Weighting = weighting
        self.power = power
        self.advantage_max = advantage_max
        self.clip = clip
        self.kl = kl
        self.ema_beta = ema_beta
        self.ema_rate = ema_rate
        self.ema_decay = ema_decay
        self.off_policy = off_policy
        self.times = times
        self.draws_per_sample = self.draws(draws_per_sample, min(6, levels) if times == "grid" else 6, times, levels)

    @property
    def rows_per_sample(self) -> int:  # noqa: D102
        return self.draws_per_sample

    @property
    def role_names(self) -> list[str]:  # noqa: D102
        needed = {"reference": self.kl > 0, "ema": self.ema_beta > 0, "old": self.off_policy}
        return [role for role, is_needed in needed.items() if is_needed]

    def on_round_start(self, round_: int) -> None:  # noqa: D102
        if self.off_policy:
            self.policy.roles.follow("old", 0.0)
        if self.ema_beta > 0 and round_ > 0:
            self.policy.roles.follow("ema", min(self.ema_rate * self.global_step, self.ema_decay))

    def levels(self, batch: Rollout) -> Tensor:
        """(N,) the noise level of each row: uniform, or a draw from the part of the grid that is the row's share."""
        if self.times == "uniform":
            return rand(draw_seeds(batch), TRAIN_TIME)
        grid = self.schedule().sigmas[1 : self.num_steps - 1]
        edges = torch.linspace(0, len(grid), self.draws_per_sample + 1).round().long().tolist()
        picked = [
            int(torch.randint(edges[draw], edges[draw + 1], (), generator=generator(seed, TRAIN_TIME)))
            for seed, draw in zip(draw_seeds(batch), batch.draws.tolist())
        ]
        return grid[torch.tensor(picked)]

    def loss(self, batch: Rollout) -> tuple[Tensor, dict[str, Tensor]]:  # noqa: D102
        advantage = batch.advantages / self.advantage_clip * self.advantage_max
        x = self.renoise(batch, self.levels(batch))
        velocity = self.velocity(x.latents, x.timestep, batch.prompts)
        log_prob = self.log_prob(velocity, x)
        old = log_prob.detach()
        if self.off_policy and self.update_in_round > 0:  # until then it is the same policy
            old = self.log_prob(self.frozen_velocity("old", x.latents, x.timestep, batch.prompts), x)
        ratio = (log_prob - old).exp()
        loss, clipped = clipped_surrogate(ratio, advantage, self.clip)
        metrics = {"error": row_mean((velocity - x.target) ** 2), "clip_fraction": clipped}
        for role, beta in {"reference": self.kl, "ema": self.ema_beta}.items():
            if beta > 0:
                anchor = self.frozen_velocity(role, x.latents, x.timestep, batch.prompts)
                metrics[f"distance_{role}"] = row_mean((velocity - anchor) ** 2)
                loss = loss + beta * metrics[f"distance_{role}"]
        return loss, metrics

    def log_prob(self, velocity: Tensor, x: Noised) -> Tensor:
        """(N,) the surrogate ``-w(l, t)`` of the log-likelihood."""
        return -weighted_error(row_mean((velocity - x.target) ** 2), x.level, self.weighting, self.power)


def weighted_error(error: Tensor, level: Tensor, weighting: Weighting, power: float = 0.25) -> Tensor:
    """w(l, t) of the paper's table.

    Args:
        error: (N,) l, the mean squared error of the velocity.
        level: (N,) t in (0, 1].
        weighting: see :class:`AWM`.
        power: p of ``ghuber``.
    """
    if weighting == "uniform":
        return error
    if weighting == "t":
        return level * error
    if weighting == "t2":
        return level**2 * error
    if weighting == "huber":
        return level * ((error + _TINY).sqrt() - _TINY**0.5)
    return level / power * ((error + _TINY) ** power - _TINY**power)
