"""From the rewards of a round to its advantages: pure functions, in float64, on the samples of all ranks at once."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lit_diffrl.rollouts.rollout import RewardSpec

Combine = Literal["sum", "normalized", "gated"]
Std = Literal["group", "global", "none"]


class Advantages(NamedTuple):
    """The outcome for N samples.

    Attributes:
        advantages: (N,) float64; exactly 0 for flat groups and for samples that are not valid.
        reward: (N,) float64, the weighted sum of the raw rewards, NaN where a sample is not valid.
        valid: (N,) bool, samples with every reward that applies to them.
        flat_groups: share of the groups whose valid samples all score the same, or which have fewer than two of them.
    """

    advantages: Tensor
    reward: Tensor
    valid: Tensor
    flat_groups: float


def advantages(
    rewards: Tensor,
    applies: Tensor,
    specs: list[RewardSpec],
    group_ids: Tensor,
    *,
    combine: Combine = "sum",
    std: Std = "group",
    clip: float | None = 5.0,
    eps: float = 1e-4,
) -> Advantages:
    """Centre the combined reward on its group and scale it.

    ``A_i = (R_i - mean of the group) / (std + eps)``, with the population standard deviation. A sample of which a
    reward failed (NaN) is masked: it gets advantage 0 and does not enter the statistics of its siblings.

    Args:
        rewards: (N, R) raw scores, NaN where scoring failed.
        applies: (N, R) bool, False where a reward is absent by its ``applies_to``; absent is neither 0 nor failed.
        specs: R weights and gates.
        group_ids: (N,) int64.
        combine: ``sum``: the weighted sum of raw scores. ``normalized``: each reward is first centred and scaled by its
            own standard deviation in the group, then weighted (MO-GRPO, arXiv 2509.22047; with ``std="global"`` the
            GDPO of arXiv 2601.05242). ``gated``: the sum of the rewards without a gate; a sample that misses a gate
            gets the least sum of its group.
        std: ``group``; ``global``, the deviation of the combined reward over the whole round; or ``none``.
        clip: bound on the magnitude, ``None`` for none.
        eps: added to the standard deviation.

    Returns:
        Advantages, raw reward, validity and the share of flat groups.

    Raises:
        ValueError: for ``gated`` without a gate or without a reward beside it, or where no reward without a gate has a
            weight.
    """
    rewards = rewards.double()
    weights = torch.tensor([s.weight for s in specs], dtype=torch.float64, device=rewards.device)
    is_gate = torch.tensor([s.gate is not None and combine == "gated" for s in specs], device=rewards.device)
    check_specs(specs, combine)
    counts = (weights != 0) | is_gate
    valid = (rewards.isfinite() | ~applies)[:, counts].all(1) & applies[:, counts].any(1)
    raw = torch.where(applies, rewards, 0.0).nan_to_num(0.0)
    additive = weights * ~is_gate
    reward = torch.where(valid, (raw * additive).sum(1), torch.nan)
    groups = torch.unique(group_ids, return_inverse=True)[1]

    if combine == "normalized":
        parts = torch.zeros_like(reward)
        for k in torch.nonzero(additive).flatten().tolist():
            has = valid & applies[:, k]
            centred, spread = _centre(raw[:, k], groups, has)
            parts = parts + additive[k] * centred / (spread + eps)
        score = parts
    elif combine == "gated":
        thresholds = torch.tensor([s.gate if s.gate is not None else -torch.inf for s in specs], dtype=torch.float64)
        passed = ((raw >= thresholds.to(raw.device)) | ~applies | ~is_gate).all(1)
        score = torch.where(passed, reward, _group_min(reward, groups, valid)[groups])
    else:
        score = reward

    centred, spread = _centre(score, groups, valid)
    if std == "global":
        spread = score[valid].std(correction=0) if bool(valid.any()) else torch.ones_like(spread)
    elif std == "none":
        spread, eps = torch.ones_like(spread), 0.0
    result = torch.where(valid, centred / (spread + eps), 0.0)
    if clip is not None:
        result = result.clamp(-clip, clip)
    alive = torch.zeros(int(groups.max()) + 1, dtype=torch.bool, device=groups.device)
    alive[groups[centred != 0]] = True
    return Advantages(result, reward, valid, 1 - alive.double().mean().item())


def check_specs(specs: list[RewardSpec], combine: Combine) -> None:
    """Refuse sets of rewards that give nothing to learn from.

    Raises:
        ValueError: if no reward has a weight, or ``gated`` has no gate.
    """
    gates = [s for s in specs if s.gate is not None]
    if combine == "gated" and not gates:
        raise ValueError("combine is 'gated', but no reward has a `gate`: give one, or use 'sum' or 'normalized'")
    if combine != "gated" and gates:
        raise ValueError(
            f"a reward has `gate: {gates[0].gate}`, which combine {combine!r} does not use: set combine 'gated'"
        )
    if not any(s.weight != 0 for s in specs if s.gate is None):
        raise ValueError("every reward has weight 0 or is a gate: nothing is left to learn from")


def _centre(x: Tensor, groups: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Deviation from the mean of the valid members of the group, and their population std, each (N,).

    Both are exactly 0 for members of a flat group, which rounding of the mean would not give.
    """
    size = int(groups.max()) + 1
    zeros = torch.zeros(size, dtype=torch.float64, device=x.device)
    x = torch.where(valid, x, 0.0)
    n = zeros.index_add(0, groups, valid.double()).clamp(min=1)
    mean = zeros.index_add(0, groups, x) / n
    centred = torch.where(valid, x - mean[groups], 0.0)
    spread = (zeros.index_add(0, groups, centred**2) / n).sqrt()
    low, high = _group_min(x, groups, valid), -_group_min(-x, groups, valid)
    moving = (high > low)[groups] & valid
    return torch.where(moving, centred, 0.0), torch.where(moving, spread[groups], 0.0)


def _group_min(x: Tensor, groups: Tensor, valid: Tensor) -> Tensor:
    """The least value of the valid members of each group, +inf for a group without any."""
    start = torch.full((int(groups.max()) + 1,), torch.inf, dtype=torch.float64, device=x.device)
    return start.scatter_reduce(0, groups, torch.where(valid, x, torch.inf), "amin")


def finite_mean(x: Tensor) -> float:
    """Mean of the finite values; NaN without any."""
    return x[x.isfinite()].mean().item()


def finite_std(x: Tensor) -> float:
    """Population standard deviation of the finite values; NaN without any."""
    x = x[x.isfinite()]
    return x.std(correction=0).item() if len(x) else torch.nan
