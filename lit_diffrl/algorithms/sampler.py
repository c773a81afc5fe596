"""Drawing from a policy, and evaluating it: fixed prompts, fixed noise, no stochastic steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lit_diffrl.algorithms.recorder import Recorder
from lit_diffrl.algorithms.settings import one_of
from lit_diffrl.policies.base import Conditioning, Grid, Policy, Size
from lit_diffrl.policies.conditioning import PromptCache
from lit_diffrl.policies.roles import DEFAULT
from lit_diffrl.rollouts import Rollout, RolloutDataModule, hooks
from lit_diffrl.rollouts.advantages import finite_mean
from lit_diffrl.rollouts.ranks import gather
from lit_diffrl.sampling import Kernel, Schedule, sample
from lit_diffrl.sampling.noise import INITIAL, STEP, randn
from lit_diffrl.sampling.solvers import SolverName


class DiffusionSampler(L.LightningModule):
    """A policy that can be drawn from, validated, tested and used for prediction; what training builds on.

    Args:
        policy: the model.
        num_steps: sampler steps of training rollouts.
        solver: of training rollouts; ``dpm2`` (second order) for algorithms without stochastic steps.
        grid: noise levels of the sampler: the checkpoint's ``native`` ones, or its shift of evenly spaced ones.
        guidance_scale: classifier-free guidance of rollouts and of training; 1 for none, and half the forwards.
        negative_prompt: what guidance above 1 steers away from.
        height: of the media, pixels; the checkpoint's own where omitted.
        width: of the media, pixels.
        num_frames: of videos.
        eval_num_steps: sampler steps of evaluation; those of training where omitted.
        eval_guidance_scale: guidance of evaluation; that of training where omitted.

    Attributes:
        scores: of the last evaluation: name -> (N,) float64 in the order of the prompt file, over all ranks, NaN where
            not scored; ``reward`` is the weighted sum.
    """

    scores: dict[str, Tensor]
    # How stochastic steps draw their noise; None for algorithms without any.
    kernel: Kernel | None = None

    def __init__(
        self,
        policy: Policy,
        num_steps: int = 10,
        solver: SolverName = "euler",
        grid: Grid = "native",
        guidance_scale: float = 1.0,
        negative_prompt: str = "",
        height: int | None = None,
        width: int | None = None,
        num_frames: int | None = None,
        eval_num_steps: int | None = None,
        eval_guidance_scale: float | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("num_steps", num_steps), ("eval_num_steps", eval_num_steps)):
            if value is not None and value < 1:
                raise ValueError(f"model.{name} is {value}; it must be at least 1")
        one_of("solver", solver, SolverName)
        one_of("grid", grid, Grid)
        self.policy = policy
        self.num_steps = num_steps
        self.solver: SolverName = solver
        self.grid: Grid = grid
        self.guidance_scale = guidance_scale
        self.negative_prompt = negative_prompt
        self.requested_size = {"height": height, "width": width, "num_frames": num_frames}
        self.eval_num_steps = eval_num_steps or num_steps
        self.eval_guidance_scale = guidance_scale if eval_guidance_scale is None else eval_guidance_scale
        self.forward_rows = self.backward_rows = 0
        self._parts: list[Rollout] = []
        self._schedules: dict[int, Schedule] = {}

    def setup(self, stage: str) -> None:
        """Refuse the precisions that would round what must not be rounded.

        Raises:
            ValueError: for ``16-true`` and ``bf16-true``.
        """
        precision = self.trainer.precision
        if precision in ("16-true", "bf16-true"):
            dtype = "float16" if precision == "16-true" else "bfloat16"
            raise ValueError(
                f"trainer.precision is {precision!r}, which would cast trainable weights and noise levels too: use "
                f"policy.dtype {dtype!r} with LoRA and trainer.precision '32-true', or "
                f"'{precision.removesuffix('-true')}-mixed'"
            )

    def configure_model(self) -> None:
        """Load the policy and settle the size of its media."""
        self.policy.load()
        native, wanted = self.policy.native_size(), {k: v for k, v in self.requested_size.items() if v is not None}
        self.size = Size(**(vars(native) | wanted))
        self.policy.latent_shape(self.size)
        self.prompt_cache = PromptCache(self.policy.encode_prompts)

    @property
    def data(self) -> RolloutDataModule:
        """The data module of the run."""
        return self.trainer.datamodule  # type: ignore[attr-defined]

    # -- the network -----------------------------------------------------------------------------------------------

    def velocity(
        self,
        latents: Tensor,
        timestep: Tensor,
        prompts: list[str],
        *,
        role: str = DEFAULT,
        guidance_scale: float | None = None,
    ) -> Tensor:
        """The velocity ``eps - x_0`` of one of the policy's roles.

        Args:
            latents: (N, ...) float32.
            timestep: (N,) float32 in [0, 1000].
            prompts: N texts.
            role: whose weights; other than the default under ``torch.no_grad`` only.
            guidance_scale: that of training where omitted.

        Returns:
            (N, ...) float32.
        """
        guidance_scale = self.guidance_scale if guidance_scale is None else guidance_scale
        cond, uncond = self.conditioning(prompts, guidance_scale)
        rows = len(latents) * (1 if uncond is None else 2)
        self.forward_rows += rows
        self.backward_rows += rows * torch.is_grad_enabled()
        with self.policy.roles.use(role):
            return self.policy.velocity(latents, timestep, cond, uncond, guidance_scale, size=self.size)

    @torch.no_grad()
    def frozen_velocity(
        self, role: str, latents: Tensor, timestep: Tensor, prompts: list[str], **options: Any
    ) -> Tensor:
        """:meth:`velocity` of another role, without gradient and without dropout."""
        with self._eval_mode():
            return self.velocity(latents, timestep, prompts, role=role, **options)

    def conditioning(self, prompts: list[str], guidance_scale: float) -> tuple[Conditioning, Conditioning | None]:
        """Embeddings of the prompts and, where guidance needs them, of the negative prompt."""
        cond = self.prompt_cache(prompts, self.device)
        if guidance_scale == 1:
            return cond, None
        return cond, self.prompt_cache([self.negative_prompt] * len(prompts), self.device)

    def schedule(self, num_steps: int | None = None) -> Schedule:
        """The grid of noise levels, on the CPU; made once, since every micro-batch asks for it."""
        num_steps = num_steps or self.num_steps
        if num_steps not in self._schedules:
            self._schedules[num_steps] = self.policy.schedule(num_steps, self.size, self.grid)
        return self._schedules[num_steps]

    # -- drawing ---------------------------------------------------------------------------------------------------

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Evaluation mode, no gradients, and the trainer's precision, which Lightning sets in its own steps only."""
        with self._eval_mode(), torch.no_grad(), self.trainer.precision_plugin.forward_context():
            yield

    @contextmanager
    def _eval_mode(self) -> Iterator[None]:
        """The policy without dropout, and afterwards as it was."""
        training = self.policy.training
        self.policy.eval()
        try:
            yield
        finally:
            self.policy.train(training)

    def generate(
        self,
        rollout: Rollout,
        schedule: Schedule,
        guidance_scale: float,
        role: str = DEFAULT,
        solver: SolverName = "euler",
        recorder: Recorder | None = None,
        initial_seeds: list[int] | None = None,
    ) -> Tensor:
        """Final latents of the samples of ``rollout``, from noise that depends on seeds alone.

        ``initial_seeds`` are those of the initial noise, where they are not the samples' own.
        """
        shape, seeds = self.policy.latent_shape(self.size), rollout.seeds.tolist()

        def draw(seeds: list[int], *counters: int) -> Tensor:
            return self.policy.prepare_latents(randn(shape, seeds, *counters), self.size).to(self.device)

        return sample(
            lambda x, t: self.velocity(x, t, rollout.prompts, role=role, guidance_scale=guidance_scale),
            draw(initial_seeds or seeds, INITIAL),
            schedule,
            solver=solver,
            kernel=self.kernel,
            stochastic=recorder.plan.stochastic if recorder is not None else None,
            noise=lambda k: draw(seeds, STEP, k),
            on_step=recorder,
        )

    # -- evaluation ------------------------------------------------------------------------------------------------

    @property
    def sampler_description(self) -> str:
        """The sampler of evaluation in words."""
        return f"euler, {self.eval_num_steps} steps, guidance {self.eval_guidance_scale:g}"

    def evaluate(self, rollout: Rollout) -> Rollout:
        """Draw the prompts of ``rollout`` with the sampler of evaluation; its forwards are not counted as training."""
        forward_rows = self.forward_rows
        with self.sampling():
            schedule = self.schedule(self.eval_num_steps)
            latents = self.generate(rollout, schedule, self.eval_guidance_scale)
            rollout.media = self.policy.decode(latents, self.size)
        self.forward_rows = forward_rows
        return rollout

    def on_validation_epoch_start(self) -> None:
        """Forget the last evaluation."""
        self._parts = []

    def validation_step(self, batch: Rollout, batch_idx: int) -> None:
        """Draw and score held-out prompts."""
        rollout = self.evaluate(batch)
        hooks.call(self.trainer, "on_rollout_batch_end", rollout)
        self._parts.append(rollout.without("media"))

    def on_validation_epoch_end(self) -> None:
        """Log the mean of every reward, overall and by source, exactly, over any number of ranks."""
        rollout = Rollout.cat(self._parts).to("cpu")
        self._parts = []
        if not rollout.rewards:
            raise RuntimeError("no reward callback scored the evaluation: add one under `rewards:`")
        stage = "test" if self.trainer.testing else "val"
        self.scores, sources = self._gather(rollout)
        reward = self.scores["reward"]
        metrics = {f"{stage}/{name}": finite_mean(score) for name, score in self.scores.items()}
        metrics[f"{stage}/failed"] = float(reward.isnan().sum())
        names = self._sources
        if len(names) > 1:
            metrics |= {f"{stage}/source/{s or 'none'}": finite_mean(reward[sources == i]) for i, s in enumerate(names)}
        # Every rank holds the same numbers already, since Lightning's mean over ranks of unequal counts is wrong.
        self.log_dict(metrics, sync_dist=True)
        self.log(f"{stage}_reward", metrics[f"{stage}/reward"], prog_bar=True, logger=False, sync_dist=True)

    on_test_epoch_start, test_step, on_test_epoch_end = (
        on_validation_epoch_start,
        validation_step,
        on_validation_epoch_end,
    )

    def predict_step(self, batch: Rollout, batch_idx: int) -> Rollout:
        """Media of the prompts of ``predict``."""
        return self.evaluate(batch).to("cpu")

    @property
    def _sources(self) -> list[str]:
        prompts = self.data.test_prompts if self.trainer.testing else self.data.val_prompts
        return sorted({p.source for p in prompts})

    def _gather(self, rollout: Rollout) -> tuple[dict[str, Tensor], Tensor]:
        """Scores of all ranks in prompt order without the padding, and the index of each prompt's source."""
        weights = {k: s.weight for k, s in rollout.reward_specs.items() if s.gate is None}
        absent = {k: torch.tensor([not s.applies(x) for x in rollout.sources]) for k, s in rollout.reward_specs.items()}
        scores = {k: x.double() for k, x in rollout.rewards.items()}
        counted = [torch.where(absent[k], 0.0, scores[k]) * w for k, w in weights.items() if w != 0]
        nobody = torch.stack(
            [absent[k] for k, w in weights.items() if w != 0] or [torch.ones(len(rollout)).bool()]
        ).all(0)
        total = torch.where(nobody, torch.nan, sum(counted, torch.zeros(len(rollout), dtype=torch.float64)))
        names = self._sources
        sources = torch.tensor([names.index(s) for s in rollout.sources])
        columns = {"index": rollout.sample_ids, "source": sources, "reward": total, **scores}
        table = torch.stack([x.double() for x in columns.values()], 1)
        table = gather(self.trainer, table).flatten(0, 1)
        table = table[table[:, 0] >= 0]
        table = table[table[:, 0].argsort()]
        return {k: table[:, i] for i, k in enumerate(columns) if i >= 2}, table[:, 1].long()
