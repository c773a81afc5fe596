r"""DiffusionOPD: on-policy distillation of several teachers into one student (arXiv 2605.15055).

The student draws its own trajectories, and at each state x_j takes over the step that the teacher of the prompt's task
would take. Both steps are Gaussians of one variance, so their divergence has a closed form:

    stochastic rollouts:     KL_j = |mu_S - mu_T|^2 / (2 std^2) = 1/2 lambda_j^2 |v_S - v_T|^2
    deterministic rollouts:  L_j = 1/2 |mu_S - mu_T|^2 = 1/2 dt_j^2 |v_S - v_T|^2

The states are not differentiated through. No reward is needed; rewards only watch.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from lit_diffrl.algorithms.recorder import Plan, random_steps, step_mask, steps_between
from lit_diffrl.algorithms.rows import row_mean
from lit_diffrl.algorithms.settings import one_of
from lit_diffrl.algorithms.trajectory import TrajectoryRL
from lit_diffrl.policies.base import Policy
from lit_diffrl.policies.teachers import Teacher, add_teacher
from lit_diffrl.rollouts import Rollout
from lit_diffrl.sampling import Kernel
from lit_diffrl.sampling.kernels import KernelName
from lit_diffrl.sampling.noise import INITIAL, randn

StepWeight = Literal["paper", "released", "uniform", "self_normalized"]
# The teacher of all prompts whose source has none of its own.
ANY = "*"


class DiffusionOPD(TrajectoryRL):
    """On-policy distillation.

    Args:
        policy: the student.
        teachers: prompt source -> its teacher, as a path or with options; ``*`` for all other sources.
        eta: noise level of the student's rollouts; 0 for deterministic ones, the paper's default.
        kernel: of stochastic rollouts.
        step_weight: what multiplies ``mean |v_S - v_T|^2`` at a step: ``paper``, the formulas above; ``released``,
            which for stochastic rollouts lacks the division by the step's length; ``uniform``, 1; or
            ``self_normalized``, 1 over the mean magnitude of the difference.
        step_range: ``[lo, hi)``, the steps that are trained on; all but the last where omitted.
        steps_per_sample: how many of them, drawn for each sample; all where omitted.
        kwargs: see :class:`~lit_diffrl.algorithms.base.DiffusionRL`; what concerns advantages has no effect.
    """

    needs_groups: ClassVar[bool] = False
    needs_rewards: ClassVar[bool] = False
    # What is kept of a step.
    fields: ClassVar[tuple[str, ...]] = ("latents",)

    def __init__(
        self,
        policy: Policy,
        teachers: dict[str, str | Teacher],
        eta: float = 0.0,
        kernel: KernelName = "flow",
        step_weight: StepWeight = "paper",
        step_range: tuple[int, int] | None = None,
        steps_per_sample: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(policy, **kwargs)
        if not teachers:
            raise ValueError("model.teachers is empty; it must name a teacher for each prompt source, or one under '*'")
        one_of("step_weight", step_weight, StepWeight)
        lo, hi = step_range or (0, max(self.num_steps - 1, 1))
        most = self.num_steps if eta == 0 else self.num_steps - 1
        if not 0 <= lo < hi <= most:
            raise ValueError(f"model.step_range is {[lo, hi]}; it must lie within {[0, most]} for model.eta {eta}")
        steps = hi - lo if steps_per_sample is None else steps_per_sample
        if not 1 <= steps <= hi - lo:
            raise ValueError(f"model.steps_per_sample is {steps}; it must lie between 1 and {hi - lo}")
        if eta > 0 and self.solver != "euler":
            raise ValueError(f"model.solver is {self.solver!r}; stochastic steps need 'euler'")
        self.teachers = {k: Teacher(t) if isinstance(t, str) else t for k, t in teachers.items()}
        self.kernel = Kernel(kernel, eta)
        self.step_weight: StepWeight = step_weight
        self.step_range = (lo, hi)
        self.steps_per_sample = steps

    @property
    def rows_per_sample(self) -> int:  # noqa: D102
        return self.steps_per_sample

    # -- teachers --------------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Check the teachers before anything is loaded.

        Raises:
            ValueError: if a prompt source has no teacher, or a teacher no prompt.
            FileNotFoundError: if a teacher is not there.
        """
        super().setup(stage)
        if stage != "fit":
            return
        sources, named = set(self.data.sources), set(self.teachers) - {ANY}
        if idle := named - sources:
            raise ValueError(f"model.teachers names {sorted(idle)}, but the prompts have the sources {sorted(sources)}")
        if ANY not in self.teachers and (orphans := sources - named):
            raise ValueError(f"model.teachers has none for the prompt sources {sorted(orphans)}, and none under '*'")
        for teacher in self.teachers.values():
            teacher.check()

    def configure_model(self) -> None:
        """Load the student, and for training the teachers."""
        super().configure_model()
        if self._trainer is not None and self.trainer.state.fn == "fit":
            for i, teacher in enumerate(self.teachers.values()):
                if f"teacher_{i}" not in self.policy.roles.names:
                    add_teacher(self.policy, f"teacher_{i}", teacher)

    def on_train_start(self) -> None:
        """Before the first update, student and teachers must differ, on every rank and whatever the round draws.

        Raises:
            ValueError: if a teacher is the student itself: its weights were loaded without an effect.
        """
        if self.global_step > 0:
            return
        rows = self.forward_rows
        for source, teacher in self.teachers.items():
            others = (p for p in self.data.prompts if p.source not in self.teachers)
            prompt = next((p for p in self.data.prompts if p.source == source), None) or next(others, None)
            if prompt is None:
                continue
            noise = randn(self.policy.latent_shape(self.size), [self.data.seed], INITIAL)
            latents = self.policy.prepare_latents(noise, self.size).to(self.device)
            question = latents, self.schedule().timesteps[:1].to(self.device), [prompt.text]
            with self.sampling():
                if torch.equal(self.velocity(*question), self.taught(*question, [prompt.source])):
                    raise ValueError(
                        f"the teacher {teacher.path} of the source {source!r} has the velocities of the student before "
                        "training, so there is nothing to learn from it: was it trained, from this model?"
                    )
        self.forward_rows = rows

    def taught(self, latents: Tensor, timestep: Tensor, prompts: list[str], sources: list[str]) -> Tensor:
        """(N, ...) the velocity of each row's own teacher."""
        own = [source if source in self.teachers else ANY for source in sources]
        velocity = torch.empty_like(latents)
        for i, (source, teacher) in enumerate(self.teachers.items()):
            rows = torch.tensor([j for j, s in enumerate(own) if s == source], device=latents.device)
            if len(rows):
                texts, options = [prompts[j] for j in rows.tolist()], {"guidance_scale": teacher.guidance_scale}
                velocity[rows] = self.frozen_velocity(f"teacher_{i}", latents[rows], timestep[rows], texts, **options)
        return velocity

    # -- collecting ------------------------------------------------------------------------------------------------

    def plan(self, rollout: Rollout, round_: int) -> Plan:  # noqa: D102
        lo, hi = self.step_range
        kept = steps_between(lo, hi, len(rollout))
        stochastic = step_mask(kept, self.num_steps)
        if self.kernel.eta == 0:
            stochastic = torch.zeros_like(stochastic)
        if self.steps_per_sample < hi - lo:
            kept = random_steps(lo, hi, self.steps_per_sample, rollout.seeds.tolist())
        return Plan(stochastic, kept, self.fields)

    def collect(self, rollout: Rollout, round_: int) -> Rollout:
        """As the base class does, with what the teachers would have done at the same states."""
        rollout = super().collect(rollout, round_)
        kept, taught = rollout.transitions, []
        with self.sampling():
            for k in range(self.steps_per_sample):
                state = kept["latents"][:, k], kept["timestep"][:, k].to(self.device)
                taught.append(self.taught(*state, rollout.prompts, rollout.sources))
        kept["teacher_velocity"] = torch.stack(taught, 1)
        return rollout

    # -- learning --------------------------------------------------------------------------------------------------

    def loss(self, batch: Rollout) -> tuple[Tensor, dict[str, Tensor]]:  # noqa: D102
        kept = batch.transitions
        velocity = self.velocity(kept["latents"], kept["timestep"], batch.prompts)
        difference = velocity - kept["teacher_velocity"]
        error = row_mean(difference**2)
        return self.weight(difference, kept) * error, {"distance_teacher": error}

    def weight(self, difference: Tensor, kept: dict[str, Tensor]) -> Tensor | float:
        """What multiplies the mean squared difference of the velocities: (N,) or a number."""
        if self.step_weight == "uniform":
            return 1.0
        if self.step_weight == "self_normalized":
            return 1 / row_mean(difference.detach().abs()).clamp(min=1e-8)
        length = kept["sigma"] - kept["sigma_next"]
        if self.kernel.eta == 0:
            return 0.5 * length**2
        divergence = 0.5 * self.transition(kept).gain.flatten() ** 2
        return divergence * length if self.step_weight == "released" else divergence
