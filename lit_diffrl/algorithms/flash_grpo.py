r"""Flash-GRPO (arXiv 2605.15980): one stochastic step a sample, the same for all samples of a prompt.

Iso-temporal grouping: the samples of a prompt share the step that is stochastic and trained on, so that their rewards
differ by what they drew, not by when. All other steps are deterministic. Temporal gradient rectification: each row is
weighted by 1/lambda, the inverse of the strength with which the log-probability answers to the velocity, normalised to
mean 1 over the update,

    L = mean w_i max(-A_i r_i, -A_i clip(r_i, 1 - c, 1 + c)),    w_i = (1 / lambda_i) / mean_j (1 / lambda_j).
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from lit_diffrl.algorithms.flow_grpo import FlowGRPO, StepWeight
from lit_diffrl.algorithms.recorder import Plan, step_mask
from lit_diffrl.algorithms.settings import one_of
from lit_diffrl.policies.base import Policy
from lit_diffrl.rollouts import Rollout
from lit_diffrl.rollouts.advantages import Std
from lit_diffrl.rollouts.geometry import permutation, split_into_updates

# Names of the shared draws of the groups' steps.
_STEPS, _OFFSET = -12, -13

StepDraw = Literal["stratified", "independent"]


class FlashGRPO(FlowGRPO):
    """Flow-GRPO with one transition a sample.

    Args:
        policy: the model to train.
        window_range: ``[lo, hi)``, the steps from which the stochastic one is drawn; the noisy half where omitted.
        step_draw: ``stratified`` spreads the groups of a round evenly over the steps, ``independent`` draws a step for
            each group on its own, as the released code does.
        step_weight: ``inverse_gain`` is the rectification; ``uniform`` does without.
        kwargs: see :class:`~lit_diffrl.algorithms.flow_grpo.FlowGRPO`; ``window`` is 1. Advantages are
            scaled by the global deviation by default, as in the released code.
    """

    def __init__(
        self,
        policy: Policy,
        num_steps: int = 10,
        window_range: tuple[int, int] | None = None,
        step_draw: StepDraw = "stratified",
        step_weight: StepWeight = "inverse_gain",
        advantage_std: Std = "global",
        **kwargs: Any,
    ) -> None:
        noisy_half = (0, max(num_steps // 2, 1))
        super().__init__(
            policy,
            num_steps=num_steps,
            window_range=window_range or noisy_half,
            step_weight=step_weight,
            advantage_std=advantage_std,
            window=1,
            **kwargs,
        )
        one_of("step_draw", step_draw, StepDraw)
        self.step_draw: StepDraw = step_draw
        self._mean_of_update: tuple[tuple[int, int], float] | None = None

    def steps(self, round_: int) -> list[int]:
        """The stochastic step of each group of a round, equal on all ranks."""
        lo, hi = self.window_range
        seed, groups, choices = self.data.seed, self.data.geometry.prompts_per_round, hi - lo
        if self.step_draw == "independent":
            return [lo + permutation(choices, seed, _STEPS, round_, group)[0] for group in range(groups)]
        # Where the groups do not divide over the steps, the steps that get one more differ from round to round.
        offset = permutation(choices, seed, _OFFSET, round_)[0]
        return [lo + (place + offset) % choices for place in permutation(groups, seed, _STEPS, round_)]

    def plan(self, rollout: Rollout, round_: int) -> Plan:  # noqa: D102
        kept = torch.tensor(self.steps(round_))[rollout.group_ids, None]
        return Plan(step_mask(kept, self.num_steps), kept, self.fields)

    def on_round_start(self, round_: int) -> None:  # noqa: D102
        self._mean_of_update = None

    def mean_inverse_gain(self) -> float:
        """Mean of 1/lambda over the samples of the update, of all ranks: the same for every split into micro-batches.

        It follows from the shared draws, so no rank has to ask another.
        """
        key = self.loader.round, self.update_in_round
        if self._mean_of_update is None or self._mean_of_update[0] != key:
            geometry, steps = self.data.geometry, self.steps(self.loader.round)
            kept = [
                steps[(rank * geometry.samples_per_rank + sample) // geometry.group_size]
                for rank in range(geometry.world_size)
                for sample in split_into_updates(self.data.seed, key[0], geometry, rank)[key[1]]
            ]
            self._mean_of_update = key, self.inverse_gains()[kept].mean().item()
        return self._mean_of_update[1]
