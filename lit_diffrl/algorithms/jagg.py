r"""JAGG: Jacobian-aggregated group gradients (arXiv 2607.17572), Flow-GRPO with two backward passes a group of steps.

The gradient of W consecutive transitions of a sample is ``sum_j J_j^T s_j``, with the Jacobians ``J_j`` of the velocity
and the upstream signals ``s_j = dL_j/dv_j``, which need no backward pass through the network. Jacobians between the
endpoints of the group are interpolated, so two composite signals are left to be propagated:

    J_j ~ (1 - alpha_j) J_0 + alpha_j J_{W-1},      alpha_j = (t_0 - t_j) / (t_0 - t_{W-1})
    gradient ~ J_0^T sum_j (1 - alpha_j) s_j + J_{W-1}^T sum_j alpha_j s_j.

It is exact for W = 2, and where the velocity is affine in (x, t) and the states lie on the chord between the endpoints.
Clipping, KL, guard and weights of Flow-GRPO act through the signals. Keep advantages centred in their group: under a
constant advantage the estimate is biased, for the state at the far endpoint depends on the noises before it.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from lit_diffrl.algorithms.flow_grpo import FlowGRPO
from lit_diffrl.algorithms.recorder import LIKELIHOOD, Plan, step_mask
from lit_diffrl.algorithms.settings import one_of
from lit_diffrl.policies.base import Policy
from lit_diffrl.rollouts import Rollout
from lit_diffrl.rollouts.geometry import permutation

# Name of the shared draw of a round's groups.
_GROUPS = -14

Interpolation = Literal["time", "index"]
Velocities = Literal["auto", "fresh"]


class JAGG(FlowGRPO):
    """Flow-GRPO with interpolated Jacobians. A row of a micro-batch is a group of transitions.

    Args:
        policy: the model to train.
        window: W, transitions in a group.
        window_range: ``[lo, hi)``, the steps of which groups are made, a multiple of W; where omitted the first ones,
            as many as make whole groups without the last step.
        groups_per_sample: groups that are stochastic and trained on, drawn anew in each round; all where omitted.
        jagg_frac: share of a sample's groups, rounded to whole ones, whose Jacobians are interpolated: those whose
            velocities are best interpolated by their endpoints. The others get exact gradients.
        interpolation: alpha by ``time``, or by ``index`` as in the released prototype.
        joint: send both endpoints through the network in one forward, instead of one after the other.
        velocities: ``auto`` takes those of the rollout until the first update after it, then computes the ones between
            the endpoints without gradient; ``fresh`` computes all of them again, as the released prototype does.
        diagnose_every: rounds between comparisons with the exact gradient of one group (``train/gradient_cosine`` and
            ``train/gradient_error``, W further rows forward and 2 W backward); 0 for none.
        kwargs: see :class:`~lit_diffrl.algorithms.flow_grpo.FlowGRPO`.
    """

    def __init__(
        self,
        policy: Policy,
        window: int = 4,
        window_range: tuple[int, int] | None = None,
        groups_per_sample: int | None = None,
        jagg_frac: float = 1.0,
        interpolation: Interpolation = "time",
        joint: bool = True,
        velocities: Velocities = "auto",
        diagnose_every: int = 10,
        **kwargs: Any,
    ) -> None:
        super().__init__(policy, window=None, window_range=window_range, **kwargs)
        one_of("interpolation", interpolation, Interpolation)
        one_of("velocities", velocities, Velocities)
        lo, hi = self.window_range
        if window < 2:
            raise ValueError(f"model.window is {window}; a group has two endpoints, so it must be at least 2")
        fitting = (hi - lo) // window * window
        if window_range is None and fitting:
            self.window_range = lo, hi = lo, lo + fitting
        if (hi - lo) % window:
            remedy = f"model.window_range {[lo, lo + fitting]}" if fitting else "a smaller model.window"
            raise ValueError(
                f"model.window_range {[lo, hi]} has {hi - lo} steps, not a multiple of model.window {window}: use "
                f"{remedy}"
            )
        total = (hi - lo) // window
        groups = total if groups_per_sample is None else groups_per_sample
        if not 1 <= groups <= total:
            raise ValueError(f"model.groups_per_sample is {groups}; it must lie between 1 and {total}")
        if not 0 <= jagg_frac <= 1:
            raise ValueError(f"model.jagg_frac is {jagg_frac}; it must lie in [0, 1]")
        if jagg_frac > 0 and round(jagg_frac * groups) == 0:
            raise ValueError(
                f"model.jagg_frac is {jagg_frac}, which of {groups} groups rounds to none; it must be 0, or a group's "
                f"share, {1 / groups:.2g}, at least"
            )
        if diagnose_every < 0:
            raise ValueError(f"model.diagnose_every is {diagnose_every}; it must be at least 0")
        self.window = window
        self.groups_per_sample = groups
        self.routed = round(jagg_frac * groups)
        self.interpolation = interpolation
        self.joint = joint
        self.velocities = velocities
        self.diagnose_every = diagnose_every

    @property
    def rows_per_sample(self) -> int:  # noqa: D102
        return self.groups_per_sample

    @property
    def fields(self) -> tuple[str, ...]:  # noqa: D102
        return (*LIKELIHOOD, "velocity")

    # -- collecting ------------------------------------------------------------------------------------------------

    def plan(self, rollout: Rollout, round_: int) -> Plan:  # noqa: D102
        lo, hi = self.window_range
        order = permutation((hi - lo) // self.window, self.data.seed, _GROUPS, round_)
        chosen = torch.tensor(sorted(order[: self.groups_per_sample]))
        kept = (lo + self.window * chosen[:, None] + torch.arange(self.window)).flatten().expand(len(rollout), -1)
        return Plan(step_mask(kept, self.num_steps), kept, self.fields)

    def collect(self, rollout: Rollout, round_: int) -> Rollout:
        """As the base class does; the transitions are then grouped, (B, groups, W, ...), the most linear first."""
        rollout = super().collect(rollout, round_)
        groups = {k: x.unflatten(1, (-1, self.window)) for k, x in rollout.transitions.items()}
        linearity = self.linearity(groups["velocity"], self.alpha(groups["sigma"]))
        order = linearity.argsort(stable=True, dim=1, descending=True)
        rows = torch.arange(len(order))[:, None]
        rollout.transitions = {k: x[rows.to(x.device), order.to(x.device)] for k, x in groups.items()}
        rollout.transitions["linearity"] = linearity[rows.to(order.device), order]
        return rollout

    @staticmethod
    def linearity(velocity: Tensor, alpha: Tensor) -> Tensor:
        """The least cosine of the velocities (B, G, W, ...) with their interpolation from the endpoints: (B, G)."""
        v, alpha = velocity.flatten(3), alpha[..., None].to(velocity.device)
        return cosine_similarity(v, (1 - alpha) * v[:, :, :1] + alpha * v[:, :, -1:], dim=3).amin(2)

    def alpha(self, sigma: Tensor) -> Tensor:
        """Where each step lies between the endpoints of its group, from 0 to 1: (..., W)."""
        if self.interpolation == "index":
            return torch.linspace(0, 1, self.window).expand(sigma.shape).to(sigma)
        return (sigma[..., :1] - sigma) / (sigma[..., :1] - sigma[..., -1:])

    # -- learning --------------------------------------------------------------------------------------------------

    def loss(self, batch: Rollout) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean loss of each group, whose gradient is that of the surrogate ``sum_k <composite_k, v_k>``."""
        n, w = len(batch), self.window
        groups = dict(batch.transitions)
        linearity, sigma = groups.pop("linearity"), groups["sigma"]
        flat = batch.without("transitions")[torch.arange(n).repeat_interleave(w)]
        flat.transitions = {k: x.flatten(0, 1) for k, x in groups.items()}
        # Groups are sorted by linearity, so routing by rank is routing by count: equal on all ranks.
        mixing = self.mixing(self.alpha(sigma), exact=batch.draws.to(sigma.device) >= self.routed)
        learnt = mixing.any(2).flatten()
        live = self.live(flat, learnt)
        proxy = self.known(flat, live, learnt).requires_grad_()
        rows, metrics = self.objective(proxy, flat)
        signals = torch.autograd.grad(rows.sum() / w, proxy)[0].view(n, w, -1)
        composite = mix(mixing, signals).flatten(0, 1)[learnt]
        owner = torch.arange(n, device=live.device).repeat_interleave(w)[learnt]
        surrogate = live.new_zeros(n).index_add(0, owner, (composite * live.flatten(1)).sum(1))
        metrics = {
            k: (x.view(n, w).amax(1) if k.endswith("_max") else x.view(n, w).mean(1)) for k, x in metrics.items()
        }
        if self.diagnose_every and self.loader.round % self.diagnose_every == 0 and self.loader.position == 1:
            metrics |= self.diagnose(flat, signals, sigma)
        value = rows.detach().view(n, w).mean(1)
        return value + surrogate - surrogate.detach(), metrics | {"linearity": linearity}

    def mixing(self, alpha: Tensor, exact: Tensor) -> Tensor:
        """(N, W, W), the share of each signal (columns) in each composite (rows); rows of zeros need no backward."""
        column = exact[:, None].expand_as(alpha)
        mixing = torch.diag_embed(column.to(alpha))
        mixing[:, 0] = torch.where(column, mixing[:, 0], 1 - alpha)
        mixing[:, -1] = torch.where(column, mixing[:, -1], alpha)
        return mixing

    def live(self, flat: Rollout, learnt: Tensor) -> Tensor:
        """Velocities with gradient of the learnt steps, in their order."""
        steps = learnt.flatten().nonzero().flatten()
        if self.joint:
            return self.velocity_of(flat, steps)
        order = steps[(steps % self.window).argsort(stable=True)]
        parts = order.split(torch.bincount(order % self.window).tolist())
        return torch.cat([self.velocity_of(flat, part) for part in parts if len(part)])[order.argsort()]

    @torch.no_grad()
    def known(self, flat: Rollout, live: Tensor, learnt: Tensor) -> Tensor:
        """Velocities without gradient of all steps, at the cost that is needed."""
        if self.velocities == "fresh":
            return self.velocity_of(flat, torch.arange(len(flat)))
        velocity = flat.transitions["velocity"].clone()
        velocity[learnt] = live.detach().to(velocity)
        others = (~learnt).nonzero().flatten()
        if self.update_in_round > 0 and len(others):  # the weights have moved since the rollout
            velocity[others] = self.velocity_of(flat, others)
        return velocity

    def velocity_of(self, flat: Rollout, rows: Tensor) -> Tensor:
        """Velocities of some of the transitions."""
        kept, rows = flat.transitions, rows.to(flat.transitions["latents"].device)
        return self.velocity(kept["latents"][rows], kept["timestep"][rows], [flat.prompts[i] for i in rows.tolist()])

    def diagnose(self, flat: Rollout, signals: Tensor, sigma: Tensor) -> dict[str, Tensor]:
        """Cosine and relative error of the gradient of one group, that of the strongest signals (N, W, ...)."""
        group = int(signals.flatten(1).norm(dim=1).argmax())
        if not signals[group].any():  # the names all the same, since ranks must agree on them
            return dict.fromkeys(("gradient_cosine", "gradient_error"), signals.new_empty(0))
        exact, ours = self.gradients(flat, signals / signals.abs().max(), sigma, group)  # nothing underflows in float16
        return {
            "gradient_cosine": (exact * ours).sum() / (exact.norm() * ours.norm()),
            "gradient_error": (ours - exact).norm() / exact.norm(),
        }

    def gradients(self, flat: Rollout, signals: Tensor, sigma: Tensor, group: int) -> tuple[Tensor, Tensor]:
        """The gradient of one group by all W Jacobians, and by interpolation: two vectors of all trained weights."""
        velocity = self.velocity_of(flat, group * self.window + torch.arange(self.window))
        weights = [p for p in self.policy.parameters() if p.requires_grad]
        mixing = self.mixing(self.alpha(sigma[group, None]), exact=sigma.new_zeros(1, dtype=torch.bool))[0]

        def gradient(upstream: Tensor) -> Tensor:
            upstream = upstream.view_as(velocity)
            parts = torch.autograd.grad(velocity, weights, upstream, retain_graph=True, materialize_grads=True)
            return torch.cat([g.flatten() for g in parts])

        return gradient(signals[group]), gradient(mix(mixing, signals[group]))


def mix(mixing: Tensor, signals: Tensor) -> Tensor:
    """The composites (..., W, D), in float32 whatever the precision of the network."""
    with torch.autocast(signals.device.type, enabled=False):
        return mixing @ signals
