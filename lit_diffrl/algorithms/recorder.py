"""What a stochastic rollout keeps of its steps."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lit_diffrl.sampling import Schedule, Step


class Plan(NamedTuple):
    """Which steps of a batch are stochastic, and which are kept to train on.

    Attributes:
        stochastic: (B, T) bool.
        kept: (B, K) int64, indices of stochastic steps in ascending order, K of each sample.
        velocities: whether the velocities of the rollout are kept as well.
    """

    stochastic: Tensor
    kept: Tensor
    velocities: bool = False


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
        # Coefficients are (B, 1, ...) where samples differ in which steps are stochastic.
        transition = type(step.transition)(*(c.expand(len(step.latents), *c.shape[1:]) for c in step.transition))
        picked = type(transition)(*(c[rows] for c in transition))
        mean = picked.mean(step.latents[rows], step.velocity[rows])
        values = {
            "latents": step.latents[rows],
            "next_latents": step.next_latents[rows],
            "log_prob": picked.log_prob(step.next_latents[rows], mean),
        }
        if self.plan.velocities:
            values["velocity"] = step.velocity[rows]
        for name, value in values.items():
            if name not in self.kept:
                self.kept[name] = value.new_empty(*self.plan.kept.shape, *value.shape[1:])
            self.kept[name][rows.to(value.device), slots.to(value.device)] = value

    def transitions(self) -> dict[str, Tensor]:
        """Name -> (B, K, ...) float32: latents, next_latents, log_prob, sigma, sigma_next, timestep, velocity."""
        steps = self.plan.kept
        levels = {
            "sigma": self.schedule.sigmas[steps],
            "sigma_next": self.schedule.sigmas[steps + 1],
            "timestep": self.schedule.timesteps[steps],
        }
        return self.kept | levels
