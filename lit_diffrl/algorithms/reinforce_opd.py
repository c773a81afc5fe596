r"""On-policy distillation by policy gradients: the baseline that DiffusionOPD's closed form is compared with.

The divergence of a step is estimated from the one next state that was drawn, and lowered with a clipped ratio:

    cost = log p_S(x'|x) - log p_T(x'|x),     L = mean max(cost r, cost clip(r, 1 - c, 1 + c)),
    r = p_theta(x'|x) / p_S(x'|x),

where p_S drew the rollout. The mean of its gradient is that of the closed form; its variance is larger. (An
advantage made of the closed-form divergence of the same step would have a mean gradient of zero: it does not depend on
the x' that was drawn.)
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from lit_diffrl.algorithms.opd import DiffusionOPD
from lit_diffrl.algorithms.recorder import LIKELIHOOD
from lit_diffrl.algorithms.rows import clipped_surrogate, row_mean
from lit_diffrl.policies.base import Policy
from lit_diffrl.policies.teachers import Teacher
from lit_diffrl.rollouts import Rollout


class ReinforceOPD(DiffusionOPD):
    """Distillation with the sampled log-ratio as the cost.

    Args:
        policy: the student.
        teachers: see :class:`~lit_diffrl.algorithms.opd.DiffusionOPD`.
        eta: noise level of the student's rollouts, above 0.
        clip: c, how far the ratio may move.
        kwargs: see :class:`~lit_diffrl.algorithms.opd.DiffusionOPD`; the sampled divergence has no step weights.
    """

    has_likelihood_ratio: ClassVar[bool] = True
    fields: ClassVar[tuple[str, ...]] = LIKELIHOOD

    def __init__(
        self,
        policy: Policy,
        teachers: dict[str, str | Teacher],
        eta: float = 0.7,
        clip: float = 1e-4,
        **kwargs: Any,
    ) -> None:
        super().__init__(policy, teachers, eta=eta, step_weight="paper", **kwargs)
        if eta <= 0 or clip <= 0:
            raise ValueError(f"model.eta is {eta} and model.clip is {clip}; both must be above 0")
        self.clip = clip

    def loss(self, batch: Rollout) -> tuple[Tensor, dict[str, Tensor]]:  # noqa: D102
        kept, step = batch.transitions, self.transition(batch.transitions)

        def log_prob(velocity: Tensor) -> Tensor:
            return step.log_prob(kept["next_latents"], step.mean(kept["latents"], velocity))

        velocity = self.velocity(kept["latents"], kept["timestep"], batch.prompts)
        # Log-probabilities are means over the elements; the cost is the sum, or the divergence would shrink as 1/D^2.
        elements = kept["latents"][0].numel()
        cost = elements * (kept["log_prob"] - log_prob(kept["teacher_velocity"]))
        ratio = (log_prob(velocity) - kept["log_prob"]).exp()
        loss, clipped = clipped_surrogate(ratio, -cost, self.clip)
        distance = row_mean((velocity.detach() - kept["teacher_velocity"]) ** 2)
        return loss, {"clip_fraction": clipped, "cost": cost, "distance_teacher": distance}
