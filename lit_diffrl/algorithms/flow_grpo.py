r"""Flow-GRPO: policy gradients through stochastic sampling steps (arXiv 2505.05470), and its descendants as options.

A rollout takes stochastic steps ``x' ~ N(mu_theta(x), std^2)``. Each kept step is trained on with the clipped ratio of
its likelihoods,

    L = mean max(-A r, -A clip(r, 1 - c, 1 + c)) + beta KL,    log r = log p_theta(x'|x) - log p_old(x'|x),

where the log-probability is averaged over the elements of the latents, and the advantage A compares a sample with its
group.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from lit_diffrl.algorithms.recorder import LIKELIHOOD, Plan, step_mask, steps_between
from lit_diffrl.algorithms.rows import clipped_surrogate, row_mean
from lit_diffrl.algorithms.settings import one_of
from lit_diffrl.algorithms.trajectory import TrajectoryRL
from lit_diffrl.policies.base import Policy
from lit_diffrl.rollouts import Rollout
from lit_diffrl.rollouts.geometry import permutation
from lit_diffrl.sampling import Kernel, Transition
from lit_diffrl.sampling.kernels import KernelName
from lit_diffrl.sampling.noise import fold

# Names of shared draws: of a round's window, and of the initial noise of a group.
_WINDOW, _GROUP_NOISE = -10, -11

KLMode = Literal["transition", "transition_no_dt", "velocity"]
StepWeight = Literal["uniform", "inverse_gain"]


class FlowGRPO(TrajectoryRL):
    """Clipped policy gradient over stochastic sampling steps.

    Args:
        policy: the model to train.
        kernel: of the stochastic steps: ``flow``, ``dance``, ``linear`` (Wan) or ``cps``.
        eta: their noise level, a in the paper; 0.7 for SD3.5, 0.9 for FLUX, 1.2 for Qwen-Image.
        clip: c, how far the ratio may move. It is small since log-probabilities are averaged over the latents.
        kl: beta, the weight of the KL divergence to the model before training; 0 costs nothing.
        kl_mode: what stands for the divergence: ``transition``, that of a step, ``1/2 lambda^2 mean |dv|^2``;
            ``transition_no_dt``, the same times the step's length, as the released image scripts compute it; or
            ``velocity``, ``mean |dv|^2``.
        window: number of consecutive steps that are stochastic and trained on, drawn anew in each round
            (Flow-GRPO-Fast); all but the last step where omitted.
        window_range: ``[lo, hi)``, the steps from which the window is drawn; all but the last where omitted.
        step_weight: ``uniform``, or ``inverse_gain``, which weights a step by the inverse of the strength with which
            its log-probability answers to the velocity (1/lambda, mean 1 over the steps of the range): gradients of all
            noise levels then have one scale.
        guard: remove the negative bias of the log-ratio and its dependence on the step (GRPO-Guard, arXiv 2510.22319,
            with the bias of each sample, not of the batch). The clip range is then around 2e-6.
        shared_noise: start all samples of a group from the same noise, so that only their stochastic steps differ.
        kwargs: see :class:`~lit_diffrl.algorithms.base.DiffusionRL`.
    """

    has_likelihood_ratio = True

    def __init__(
        self,
        policy: Policy,
        kernel: KernelName = "flow",
        eta: float = 0.7,
        clip: float = 1e-4,
        kl: float = 0.0,
        kl_mode: KLMode = "transition",
        window: int | None = None,
        window_range: tuple[int, int] | None = None,
        step_weight: StepWeight = "uniform",
        guard: bool = False,
        shared_noise: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(policy, **kwargs)
        one_of("kl_mode", kl_mode, KLMode)
        one_of("step_weight", step_weight, StepWeight)
        if eta <= 0:
            raise ValueError(f"model.eta is {eta}; stochastic steps need a noise level above 0")
        if clip <= 0 or kl < 0:
            raise ValueError(f"model.clip is {clip} and model.kl is {kl}; clip must be above 0 and kl at least 0")
        if self.solver != "euler":
            raise ValueError(f"model.solver is {self.solver!r}; stochastic steps need 'euler'")
        if self.num_steps < 2:
            raise ValueError(
                f"model.num_steps is {self.num_steps}; the last step is not trained on, so it must be at least 2"
            )
        lo, hi = window_range or (0, self.num_steps - 1)
        if not 0 <= lo < hi <= self.num_steps - 1:
            raise ValueError(
                f"model.window_range is {[lo, hi]}; it must lie within [0, {self.num_steps - 1}], for the last of "
                f"model.num_steps {self.num_steps} is deterministic"
            )
        if window is not None and not 1 <= window <= hi - lo:
            raise ValueError(
                f"model.window is {window}; it must lie between 1 and the {hi - lo} steps of the range {[lo, hi]}"
            )
        if guard and step_weight != "uniform":
            raise ValueError(
                f"model.step_weight is {step_weight!r}; model.guard weights steps by itself: use 'uniform'"
            )
        self.kernel = Kernel(kernel, eta)
        self.clip = clip
        self.kl = kl
        self.kl_mode: KLMode = kl_mode
        self.window = hi - lo if window is None else window
        self.window_range = (lo, hi)
        self.step_weight: StepWeight = step_weight
        self.guard = guard
        self.shared_noise = shared_noise

    @property
    def rows_per_sample(self) -> int:  # noqa: D102
        return self.window

    @property
    def role_names(self) -> list[str]:  # noqa: D102
        return ["reference"] if self.kl > 0 else []

    def window_start(self, round_: int) -> int:
        """The first stochastic step of a round, equal on all ranks."""
        lo, hi = self.window_range
        starts = hi - lo - self.window + 1
        return lo + permutation(starts, self.data.seed, _WINDOW, round_)[0]

    def plan(self, rollout: Rollout, round_: int) -> Plan:  # noqa: D102
        start = self.window_start(round_)
        kept = steps_between(start, start + self.window, len(rollout))
        return Plan(step_mask(kept, self.num_steps), kept, self.fields)

    @property
    def fields(self) -> tuple[str, ...]:
        """What is kept of a step."""
        return (*LIKELIHOOD, "velocity") if self.guard else LIKELIHOOD

    def initial_seeds(self, rollout: Rollout, round_: int) -> list[int]:  # noqa: D102
        if not self.shared_noise:
            return super().initial_seeds(rollout, round_)
        return [fold(self.data.seed, _GROUP_NOISE, round_, group) for group in rollout.group_ids.tolist()]

    def loss(self, batch: Rollout) -> tuple[Tensor, dict[str, Tensor]]:  # noqa: D102
        kept = batch.transitions
        return self.objective(self.velocity(kept["latents"], kept["timestep"], batch.prompts), batch)

    def objective(self, velocity: Tensor, batch: Rollout) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of each transition as a function of its velocity (N, ...), and what to log of it."""
        kept, step = batch.transitions, self.transition(batch.transitions)
        log_ratio = step.log_prob(kept["next_latents"], step.mean(kept["latents"], velocity)) - kept["log_prob"]
        if self.guard:
            log_ratio = self.guarded(log_ratio, step, velocity, kept["velocity"])
        ratio = log_ratio.exp()
        loss, clipped = clipped_surrogate(ratio, batch.advantages, self.clip)
        loss = loss * self.weight(step, kept)
        metrics = {"clip_fraction": clipped, "ratio_deviation": (ratio - 1).abs()}
        if self.update_in_round == 0:  # the same weights drew the round: anything but 1 is rounding, or a fault
            metrics["first_ratio_deviation_max"] = (ratio - 1).abs()
        if self.kl > 0:
            reference = self.frozen_velocity("reference", kept["latents"], kept["timestep"], batch.prompts)
            metrics["kl"] = self.divergence(step, kept, velocity, reference)
            loss = loss + self.kl * metrics["kl"]
        return loss, metrics

    def divergence(self, step: Transition, kept: dict[str, Tensor], velocity: Tensor, reference: Tensor) -> Tensor:
        """(N,) the divergence from the reference, by ``kl_mode``."""
        if self.kl_mode == "velocity":
            return row_mean((velocity - reference) ** 2)
        length = kept["sigma"] - kept["sigma_next"] if self.kl_mode == "transition_no_dt" else 1.0
        return step.kl(velocity, reference) * length

    def guarded(self, log_ratio: Tensor, step: Transition, velocity: Tensor, old_velocity: Tensor) -> Tensor:
        """The ratio of GRPO-Guard: equals ``mean eps (mu - mu_old)``, of mean 0 and one spread at all noise levels."""
        shift = (step.b * (velocity - old_velocity)) ** 2 / (2 * step.std**2)
        return (log_ratio + row_mean(shift)) * step.std.flatten()

    def weight(self, step: Transition, kept: dict[str, Tensor]) -> Tensor | float:
        """The weight of each row: 1/lambda, of mean 1 over the trainable steps, and the step length of GRPO-Guard."""
        weight: Tensor | float = 1.0
        if self.guard:
            weight = 1 / (kept["sigma"] - kept["sigma_next"])
        if self.step_weight == "inverse_gain":
            weight = weight / step.gain.flatten() / self.mean_inverse_gain()
        return weight

    def mean_inverse_gain(self) -> float:
        """Mean of 1/lambda over the steps from which the window is drawn."""
        lo, hi = self.window_range
        return self.inverse_gains()[lo:hi].mean().item()

    def inverse_gains(self) -> Tensor:
        """(T,) 1/lambda of every step of the grid."""
        sigmas = self.schedule().sigmas
        return 1 / self.kernel.transition(sigmas[:-1], sigmas[1:], sigmas).gain
