r"""RVM: reward-based velocity matching (arXiv 2608.23664).

Clean samples are noised again, once, and regressed on with a signed weight, no likelihood and no clipping:

    L = 1/2 E[ r |v_theta(x_t) - v|^2 + beta |v_theta(x_t) - v_anchor(x_t)|^2 ],    v = eps - x_0,  t ~ U(0, 1).

``r`` pulls towards good samples and pushes away from bad ones. The loss is evaluated in its detached-target form, whose
gradient is the same and whose value is never negative: ``1/2 |v_theta - sg[v_theta - g]|^2`` with
``g = r (v_theta - v) + beta (v_theta - v_anchor)``.

Nothing guarantees convergence: where bad samples prevail (mean r + beta below 0) the loss is unbounded. Watch
``train/velocity_norm`` and the held-out reward, and stop early, or anchor.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from lit_diffrl.algorithms.matching import MatchingRL, draw_seeds
from lit_diffrl.algorithms.rows import row_mean
from lit_diffrl.algorithms.settings import one_of
from lit_diffrl.policies.base import Policy
from lit_diffrl.rollouts import Rollout
from lit_diffrl.rollouts.advantages import Std
from lit_diffrl.sampling.noise import TRAIN_TIME, rand

Anchor = Literal["reference", "ema", "old"]


class RVM(MatchingRL):
    """Reward-based velocity matching.

    Args:
        policy: the model to train.
        shaping: the constant by which advantages become r, 0.1 in the paper. It matters relative to ``beta`` only.
        beta: weight of the anchor; 0 costs no forward.
        anchor: ``reference`` (the model before training), ``ema`` (an average of the policy), or ``old`` (the policy
            that drew the round).
        anchor_guidance_scale: guidance of the anchor.
        anchor_decay: of the ``ema`` anchor, applied once an update.
        draws_per_sample: noise draws of each sample in a round; 1 in the paper.
        kwargs: see :class:`~lit_diffrl.algorithms.base.DiffusionRL`. Advantages are scaled by the global deviation by
            default: that of a group would blow up scoring noise where samples are all alike.
    """

    def __init__(
        self,
        policy: Policy,
        shaping: float = 0.1,
        beta: float = 0.0,
        anchor: Anchor = "reference",
        anchor_guidance_scale: float = 1.0,
        anchor_decay: float = 0.9,
        draws_per_sample: int = 1,
        advantage_std: Std = "global",
        **kwargs: Any,
    ) -> None:
        super().__init__(policy, advantage_std=advantage_std, **kwargs)
        one_of("anchor", anchor, Anchor)
        if beta < 0 or shaping <= 0:
            raise ValueError(
                f"model.beta is {beta} and model.shaping is {shaping}; beta must be at least 0, shaping above 0"
            )
        if not 0 <= anchor_decay < 1:
            raise ValueError(f"model.anchor_decay is {anchor_decay}; it must lie in [0, 1)")
        if draws_per_sample < 1:
            raise ValueError(f"model.draws_per_sample is {draws_per_sample}; it must be at least 1")
        self.shaping = shaping
        self.beta = beta
        self.anchor: Anchor = anchor
        self.anchor_guidance_scale = anchor_guidance_scale
        self.anchor_decay = anchor_decay
        self.draws_per_sample = draws_per_sample

    @property
    def rows_per_sample(self) -> int:  # noqa: D102
        return self.draws_per_sample

    @property
    def role_names(self) -> list[str]:  # noqa: D102
        return [self.anchor] if self.beta > 0 else []

    def on_round_start(self, round_: int) -> None:  # noqa: D102
        if "old" in self.role_names:
            self.policy.roles.follow("old", 0.0)

    def on_update_end(self) -> None:  # noqa: D102
        if "ema" in self.role_names:
            self.policy.roles.follow("ema", self.anchor_decay)

    def loss(self, batch: Rollout) -> tuple[Tensor, dict[str, Tensor]]:  # noqa: D102
        r = self.shaping * batch.advantages
        x = self.renoise(batch, rand(draw_seeds(batch), TRAIN_TIME))
        velocity = self.velocity(x.latents, x.timestep, batch.prompts)
        anchors = self.anchors(x.latents, x.timestep, batch.prompts)
        loss = velocity_matching(velocity, x.target, r, *anchors)
        error = row_mean((velocity - x.target) ** 2)
        metrics = {"velocity_norm": row_mean(velocity.abs()), "error": error, "signed_loss": 0.5 * r * error}
        return loss, metrics

    def anchors(self, latents: Tensor, timestep: Tensor, prompts: list[str]) -> list[tuple[float, Tensor]]:
        """The weight and the velocity of the anchor, where there is one."""
        if self.beta == 0:
            return []
        guidance = {"guidance_scale": self.anchor_guidance_scale}
        return [(self.beta, self.frozen_velocity(self.anchor, latents, timestep, prompts, **guidance))]


def velocity_matching(
    velocity: Tensor, target: Tensor, weight: Tensor, *anchors: tuple[float | Tensor, Tensor]
) -> Tensor:
    """``1/2 (weight |v - target|^2 + sum_k beta_k |v - anchor_k|^2)`` in detached-target form.

    Args:
        velocity: (N, ...) of the policy, with gradient.
        target: (N, ...).
        weight: (N,) signed.
        anchors: pairs of a weight, number or (N,), and a velocity (N, ...).

    Returns:
        (N,) loss, whose gradient is that of the formula, and whose value is ``1/2 mean g^2`` with ``g`` the formula's
        gradient with respect to the velocity.
    """
    v = velocity.detach()
    column = [-1, *[1] * (v.ndim - 1)]
    g = weight.view(column) * (v - target)
    for beta, anchor in anchors:
        g = g + (beta.view(column) if isinstance(beta, Tensor) else beta) * (v - anchor)
    return 0.5 * row_mean((velocity - (v - g)) ** 2)
