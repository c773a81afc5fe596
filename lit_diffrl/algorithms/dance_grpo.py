r"""DanceGRPO (arXiv 2505.07818): Flow-GRPO with a constant diffusion coefficient, one noise a group, and random steps.

All steps but the last are stochastic, and each sample is trained on a random part of its own. The loss is that of
Flow-GRPO.
"""

from __future__ import annotations

from typing import Any

from lit_diffrl.algorithms.flow_grpo import FlowGRPO
from lit_diffrl.algorithms.recorder import Plan, random_steps, step_mask, steps_between
from lit_diffrl.policies.base import Policy
from lit_diffrl.rollouts import Rollout
from lit_diffrl.sampling.kernels import KernelName

# Share of the steps that is trained on, in the released code.
_TRAINED = 0.6


class DanceGRPO(FlowGRPO):
    """Flow-GRPO with the settings of DanceGRPO.

    Args:
        policy: the model to train.
        kernel: of the stochastic steps.
        eta: their noise level, 0.3 in the released image recipes, 0.25 for HunyuanVideo.
        shared_noise: start all samples of a group from the same noise.
        steps_per_sample: transitions that are trained on, drawn at random for each sample from the range of steps;
            0.6 of the range, rounded down, where omitted.
        kwargs: see :class:`~lit_diffrl.algorithms.flow_grpo.FlowGRPO`; there is no ``window``.
    """

    def __init__(
        self,
        policy: Policy,
        kernel: KernelName = "dance",
        eta: float = 0.3,
        shared_noise: bool = True,
        steps_per_sample: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(policy, kernel=kernel, eta=eta, window=None, shared_noise=shared_noise, **kwargs)
        lo, hi = self.window_range
        count = max(1, int(_TRAINED * (hi - lo))) if steps_per_sample is None else steps_per_sample
        if not 1 <= count <= hi - lo:
            raise ValueError(
                f"model.steps_per_sample is {count}; it must lie between 1 and the {hi - lo} steps of the range "
                f"{[lo, hi]}"
            )
        self.steps_per_sample = count

    @property
    def rows_per_sample(self) -> int:  # noqa: D102
        return self.steps_per_sample

    def plan(self, rollout: Rollout, round_: int) -> Plan:  # noqa: D102
        lo, hi = self.window_range
        stochastic = step_mask(steps_between(lo, hi, len(rollout)), self.num_steps)
        kept = random_steps(lo, hi, self.steps_per_sample, rollout.seeds.tolist())
        return Plan(stochastic, kept, self.fields)
