"""What every algorithm shares: rollouts, the training step, evaluation, roles, the optimiser and checkpoints."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from functools import partial
from typing import Any, ClassVar

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from lit_diffrl.algorithms.meter import Meter
from lit_diffrl.algorithms.recorder import Plan, Recorder
from lit_diffrl.algorithms.sampler import DiffusionSampler
from lit_diffrl.algorithms.settings import one_of
from lit_diffrl.policies.base import Policy
from lit_diffrl.policies.roles import DEFAULT
from lit_diffrl.rollouts import Rollout
from lit_diffrl.rollouts.advantages import Combine, Std
from lit_diffrl.rollouts.loader import RolloutLoader
from lit_diffrl.rollouts.ranks import gather
from lit_diffrl.sampling.noise import fold

# Name of the draws of dropout masks.
_DROPOUT = -20


class DiffusionRL(DiffusionSampler, ABC):
    """Reinforcement learning of a diffusion policy. An algorithm adds which rows a round trains on, and their loss.

    Args:
        policy: the model to train.
        optimizer: makes the optimiser of the trainable parameters.
        lr_scheduler: makes its schedule, stepped once an update.
        combine: how several rewards become one: ``sum`` of the weighted raw scores, ``normalized`` (each by its own
            deviation in the group) or ``gated`` (rewards with a ``gate`` must be passed).
        advantage_std: what advantages are divided by: the deviation in the ``group``, the ``global`` one of the round,
            or ``none``.
        advantage_clip: bound on their magnitude.
        kwargs: see :class:`~lit_diffrl.algorithms.sampler.DiffusionSampler`.
    """

    # Whether advantages compare the samples of a prompt, which then must be two at least.
    needs_groups: ClassVar[bool] = True
    # Whether the loss needs advantages; rewards only watch otherwise, and there may be none.
    needs_rewards: ClassVar[bool] = True
    # Whether the loss compares likelihoods of one network, which dropout would falsify.
    has_likelihood_ratio: ClassVar[bool] = False
    # Whether the loss wants `batch.latents`, the final latents.
    keeps_latents: ClassVar[bool] = False
    # The role that draws the rollouts.
    behaviour: ClassVar[str] = DEFAULT

    def __init__(
        self,
        policy: Policy,
        optimizer: OptimizerCallable = lambda p: torch.optim.AdamW(p, lr=1e-4, weight_decay=1e-4),
        lr_scheduler: LRSchedulerCallable | None = None,
        combine: Combine = "sum",
        advantage_std: Std = "group",
        advantage_clip: float = 5.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(policy, **kwargs)
        one_of("combine", combine, Combine)
        one_of("advantage_std", advantage_std, Std)
        if advantage_clip <= 0:
            raise ValueError(f"model.advantage_clip is {advantage_clip}; it must be above 0")
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.advantage_clip = advantage_clip
        self.advantage_options: dict[str, Any] = {"combine": combine, "std": advantage_std, "clip": advantage_clip}
        self.strict_loading = False  # checkpoints hold what is trained; on_load_checkpoint checks that it is complete
        self.skipped_updates = 0
        self.meter = Meter()

    # -- what an algorithm writes ----------------------------------------------------------------------------------

    @property
    def rows_per_sample(self) -> int:
        """Rows that a round makes of each sample."""
        return 1

    @property
    def role_names(self) -> list[str]:
        """The further weights that it needs, of ``reference``, ``old`` and ``ema``; none for a zero coefficient."""
        return []

    def plan(self, rollout: Rollout, round_: int) -> Plan | None:
        """Which steps of which samples are stochastic and kept; ``None`` for deterministic rollouts."""
        return None

    def initial_seeds(self, rollout: Rollout, round_: int) -> list[int]:
        """The seeds of the initial noise of a round's samples: their own."""
        return rollout.seeds.tolist()

    @abstractmethod
    def loss(self, batch: Rollout) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of each row of a micro-batch, (N,), and what to log of it.

        Metrics are scalars, (N,), or empty where a micro-batch has none; their mean over the round is logged, or the
        maximum for a name ending in ``_max``.
        """

    def on_round_start(self, round_: int) -> None:
        """Before a round is collected, on all ranks; not repeated where a run resumes inside of it."""

    def on_update_end(self) -> None:
        """After an optimiser step."""

    # -- rollouts --------------------------------------------------------------------------------------------------

    def collect(self, rollout: Rollout, round_: int) -> Rollout:
        """Sample a batch of a round, with its media and what the algorithm keeps."""
        plan, schedule = self.plan(rollout, round_), self.schedule()
        recorder = Recorder(plan, schedule) if plan is not None else None
        with self.sampling():
            latents = self.generate(
                rollout,
                schedule,
                self.guidance_scale,
                self.behaviour,
                self.solver,
                recorder,
                self.initial_seeds(rollout, round_),
            )
            rollout.media = self.policy.decode(latents, self.size)
        if recorder is not None:
            rollout.transitions = recorder.transitions()
        if self.keeps_latents:
            rollout.latents = latents
        return rollout

    # -- Lightning -------------------------------------------------------------------------------------------------

    def configure_model(self) -> None:
        """Load the policy and the roles that the algorithm needs."""
        super().configure_model()
        for role in self.role_names:
            self.policy.roles.add(role)
        lora = self.policy.lora
        if self.has_likelihood_ratio and lora is not None and lora.dropout > 0:
            rank_zero_warn(
                f"policy.lora.dropout {lora.dropout} is off: {type(self).__name__} compares likelihoods of one network"
            )

    def configure_optimizers(self) -> Any:
        """The optimiser of the trainable parameters and its schedule."""
        optimizer = self.optimizer([p for p in self.parameters() if p.requires_grad])
        if self.lr_scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.lr_scheduler(optimizer), "interval": "step"}}

    def on_fit_start(self) -> None:
        """Say how much is trained."""
        sizes = [(p.numel(), p.requires_grad) for p in self.policy.transformer.parameters()]
        trained, total = sum(n for n, grad in sizes if grad), sum(n for n, _ in sizes)
        rank_zero_info(f"Training {trained:,} of {total:,} parameters of the transformer")

    def on_train_batch_start(self, batch: Rollout, batch_idx: int) -> None:
        """Set dropout as the loss needs it, with masks that a resumed run draws again."""
        self.policy.train(not self.has_likelihood_ratio)
        if not self.has_likelihood_ratio and self.policy.lora is not None and self.policy.lora.dropout > 0:
            torch.manual_seed(fold(self.data.seed, _DROPOUT, self.current_epoch, self.global_rank, batch_idx))

    def training_step(self, batch: Rollout, batch_idx: int) -> Tensor:
        """The mean loss of an update, of which a micro-batch contributes its share, the smaller last one too."""
        rows, metrics = self.loss(batch)
        geometry = self.data.geometry
        for name, value in {"loss": rows, **metrics}.items():
            self.meter.update(name, value[batch.valid] if value.shape == rows.shape else value)
        return torch.where(batch.valid, rows, 0.0).sum() * geometry.micro_batches / geometry.rows_per_update

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """One update; callbacks that write checkpoints come after it."""
        super().optimizer_step(*args, **kwargs)
        self.on_update_end()

    @property
    def update_in_round(self) -> int:
        """Optimiser steps that the round has done before the present micro-batch."""
        return (self.loader.position - 1) // self.data.geometry.micro_batches

    @property
    def loader(self) -> RolloutLoader:
        """The loader of the run."""
        return self.trainer.train_dataloader  # type: ignore[return-value]

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Log the gradient norm before clipping; an update with a non-finite gradient is skipped and counted."""
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if not bool(norm.isfinite()):
            self.skipped_updates += 1
            rank_zero_warn(f"update {self.global_step}: the gradient is not finite, so it is skipped")
            if getattr(self.trainer.precision_plugin, "scaler", None) is None:  # a scaler skips, and needs to see why
                optimizer.zero_grad(set_to_none=True)
        else:
            self.meter.update("grad_norm", norm)

    def on_train_epoch_end(self) -> None:
        """Log the round: rewards, means of the metrics, seconds, and rows that went through the network so far."""
        loader = self.loader
        metrics = {f"train/{k}": v for k, v in self.meter.compute(partial(gather, self.trainer)).items()}
        metrics |= {
            "train/skipped_updates": float(self.skipped_updates),
            "time/learn": time.monotonic() - loader.collected,
        }
        metrics |= {"cost/forward_rows": float(self.forward_rows), "cost/backward_rows": float(self.backward_rows)}
        # Ranks differ in their seconds, and in rows where teachers differ in their guidance.
        self.log_dict(loader.metrics | metrics, sync_dist=True)
        if "reward/mean" in loader.metrics:
            self.log("reward", loader.metrics["reward/mean"], prog_bar=True, logger=False, sync_dist=True)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep what training changes: adapters, or the transformer and its moving roles."""
        checkpoint["state_dict"] = self.policy.trainable_state(checkpoint["state_dict"], "policy.")
        checkpoint["counters"] = [self.forward_rows, self.backward_rows, self.skipped_updates]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Check that nothing that is trained is missing, since loading is not strict.

        Raises:
            ValueError: if the checkpoint is of another model.
        """
        ours = set(self.policy.trainable_state(self.state_dict(), "policy."))
        missing, unknown = ours - set(checkpoint["state_dict"]), set(checkpoint["state_dict"]) - ours
        if missing or unknown:
            parts = (
                [f"it lacks {len(missing)} of {len(ours)} trained tensors, such as {min(missing)}"] if missing else []
            )
            parts += [f"it has {len(unknown)} that the model does not have, such as {min(unknown)}"] if unknown else []
            raise ValueError(f"the checkpoint does not fit the model: {'; '.join(parts)}")
        self.forward_rows, self.backward_rows, self.skipped_updates = checkpoint["counters"]
