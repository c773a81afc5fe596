"""What a stochastic rollout keeps of its steps."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lit_diffrl.sampling import Schedule, Step
from lit_diffrl.sampling.noise import TRAIN_STEPS, generator

# What likelihood ratios need of a step.
LIKELIHOOD = ("latents", "next_latents", "log_prob")


class Plan(NamedTuple):
    """Which steps of a batch are stochastic, and which are kept to train on.

    Attributes:
        stochastic: (B, T) bool.
        kept: (B, K) int64, indices of steps in ascending order, K of each sample.
        fields: what is kept of them, of ``latents``, ``next_latents``, ``log_prob`` (of stochastic steps only) and
            ``velocity``.
    """

    stochastic: Tensor
    kept: Tensor
    fields: tuple[str, ...] = LIKELIHOOD


def steps_between(first: int, last: int, samples: int) -> Tensor:
    """The steps ``[first, last)`` of every sample: (B, K)."""
    return torch.arange(first, last).expand(samples, -1)


def step_mask(steps: Tensor, num_steps: int) -> Tensor:
    """Steps (B, K) as a mask (B, T)."""
    return torch.zeros(len(steps), num_steps, dtype=torch.bool).scatter(1, steps, True)


def random_steps(first: int, last: int, count: int, seeds: list[int]) -> Tensor:
    """``count`` different steps of ``[first, last)`` in ascending order, for each sample its own: (B, K)."""
    orders = [torch.randperm(last - first, generator=generator(seed, TRAIN_STEPS))[:count] for seed in seeds]
    return first + torch.stack(orders).sort(1).values


class Recorder:
    """Collects the kept transitions of a batch; given to the sampling loop as its ``on_step``.

    Args:
        plan: what to keep.
        schedule: of the rollout.
    """

    def __init__(self, plan: Plan, schedule: Schedule) -> None:
        self.plan = plan
        self.schedule = schedule
        self.kept: dict[str, Tensor] = {}

    def __call__(self, step: Step) -> None:
        """Note one step of the loop."""
        rows, slots = torch.nonzero(self.plan.kept == step.number, as_tuple=True)
        if not len(rows):
            return
        for name in self.plan.fields:
            value = _log_prob(step, rows) if name == "log_prob" else getattr(step, name)[rows]
            if name not in self.kept:
                self.kept[name] = value.new_empty(*self.plan.kept.shape, *value.shape[1:])
            self.kept[name][rows.to(value.device), slots.to(value.device)] = value

    def transitions(self) -> dict[str, Tensor]:
        """Name -> (B, K, ...) float32: the fields of the plan, and sigma, sigma_next and timestep."""
        steps = self.plan.kept
        levels = {
            "sigma": self.schedule.sigmas[steps],
            "sigma_next": self.schedule.sigmas[steps + 1],
            "timestep": self.schedule.timesteps[steps],
        }
        return self.kept | levels


def _log_prob(step: Step, rows: Tensor) -> Tensor:
    """The log-probability of some samples' step, which must be stochastic for them."""
    # Coefficients are (B, 1, ...) once a sample's step is stochastic, or (1, ...) if all of them are alike.
    coefficients = (c.expand(len(step.latents), *c.shape[1:])[rows] for c in step.transition)
    transition = type(step.transition)(*coefficients)
    return transition.log_prob(step.next_latents[rows], transition.mean(step.latents[rows], step.velocity[rows]))
