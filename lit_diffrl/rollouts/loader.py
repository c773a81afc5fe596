"""The loader whose epoch is a round: on its first ``next`` it collects, then it deals out micro-batches."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lit_diffrl.rollouts import hooks
from lit_diffrl.rollouts.advantages import advantages, finite_mean, finite_std
from lit_diffrl.rollouts.geometry import draw_prompts, sample_seed, split_into_updates
from lit_diffrl.rollouts.ranks import gather
from lit_diffrl.rollouts.rollout import Rollout

if TYPE_CHECKING:
    from lit_diffrl.rollouts.datamodule import RolloutDataModule


class RolloutLoader:
    """Micro-batches of a round.

    It has a length, so Lightning does not prefetch, and its iterator is a generator, so nothing is drawn before
    ``on_train_epoch_start``. ``state_dict`` carries a half-learnt round of every rank through a checkpoint.

    Args:
        data: whose prompts and geometry it uses.
    """

    def __init__(self, data: RolloutDataModule) -> None:
        self.data = data
        self.buffer: Rollout | None = None
        self.round = self.position = self.unscored_rounds = 0
        self.metrics: dict[str, float] = {}
        self.collected = time.monotonic()

    @property
    def trainer(self) -> Any:
        """The trainer."""
        return self.data.trainer

    @property
    def module(self) -> Any:
        """The algorithm."""
        return self.trainer.lightning_module

    def __len__(self) -> int:
        return self.data.geometry.updates_per_round * self.data.geometry.micro_batches

    def __iter__(self) -> Iterator[Rollout]:
        if self.buffer is None or self.round != self.trainer.current_epoch:  # an epoch may be cut short
            self.round, self.position = self.trainer.current_epoch, 0
            self.buffer = self.collect()
        buffer = self.buffer
        if buffer is None:
            return
        for samples, draws in self._deal()[self.position :]:
            self.position += 1
            if self.position == len(self):  # used up: a checkpoint from here on is at a round's boundary
                self.buffer = None
            yield buffer.rows(samples, draws)

    def collect(self) -> Rollout | None:
        """Draw this rank's part of the round, score it, and give every sample its advantage.

        Returns:
            The samples, or ``None`` where no sample of any rank got a valid reward.

        Raises:
            RuntimeError: after ``data.max_unscored_rounds`` rounds of that kind in a row.
        """
        start = time.monotonic()
        rollout = self._blank()
        self.module.meter.reset()
        self.module.on_round_start(self.round)
        hooks.call(self.trainer, "on_rollout_start", len(rollout))
        parts, seconds = [], 0.0
        for first in range(0, len(rollout), self.data.rollout_batch_size):
            part = self.module.collect(rollout[first : first + self.data.rollout_batch_size], self.round)
            scoring = time.monotonic()
            hooks.call(self.trainer, "on_rollout_batch_end", part)
            seconds += time.monotonic() - scoring
            parts.append(part.to("cpu"))
        rollout = Rollout.cat(parts)
        scored = self._compare(rollout)
        hooks.call(self.trainer, "on_rollout_end", rollout)
        self.metrics |= {
            "time/rollout": time.monotonic() - start - seconds,
            "time/reward": seconds,
        }
        self._count_unscored(scored)
        self.collected = time.monotonic()
        return rollout.without("media").finite() if scored else None

    def _blank(self) -> Rollout:
        """This rank's samples before they are drawn: consecutive numbers, so that groups may straddle ranks."""
        data, geometry = self.data, self.data.geometry
        # overfit_batches asks for the same data again and again.
        round_ = 0 if self.trainer.overfit_batches else self.round
        drawn = draw_prompts(data.seed, round_, geometry.prompts_per_round, len(data.prompts))
        first = self.trainer.global_rank * geometry.samples_per_rank
        ids = list(range(first, first + geometry.samples_per_rank))
        prompts = [data.prompts[drawn[i // geometry.group_size]] for i in ids]
        return Rollout(
            [p.text for p in prompts],
            sources=[p.source for p in prompts],
            metadata=[p.metadata for p in prompts],
            sample_ids=torch.tensor(ids),
            group_ids=torch.tensor([i // geometry.group_size for i in ids]),
            seeds=torch.tensor([sample_seed(data.seed, round_, i) for i in ids]),
        )

    def _compare(self, rollout: Rollout) -> bool:
        """Advantages over the samples of all ranks, in one collective; whether there is anything to learn from."""
        learns = self.module.needs_rewards
        self.metrics, scored = {}, True
        if not learns:  # rewards, if there are any, only watch
            rollout.advantages, rollout.valid = torch.zeros(len(rollout)), rollout.is_finite()
            valid = gather(self.trainer, rollout.valid.double())
            self.metrics["train/astray"], scored = 1 - valid.mean().item(), bool(valid.any())
        if not rollout.rewards:
            if learns:
                raise RuntimeError("no reward callback scored the rollout: add one under `rewards:`")
            return scored
        names, specs, sources = list(rollout.rewards), list(rollout.reward_specs.values()), self.data.sources
        scores = torch.stack([rollout.rewards[k].double() for k in names], 1)
        applies = torch.tensor([[s.applies(source) for s in specs] for source in rollout.sources])
        source_ids = torch.tensor([sources.index(s) for s in rollout.sources])
        ids = torch.stack([rollout.group_ids, source_ids], 1)
        table = gather(self.trainer, torch.cat([scores, applies.double(), ids.double()], 1)).flatten(0, 1)
        scores, applies = table[:, : len(names)], table[:, len(names) : -2].bool()
        group_ids, source_ids = table[:, -2].long(), table[:, -1].long()
        whole = ["/" not in name for name in names]  # a part of a reward, name/part, may not apply by nature
        self.metrics |= {
            "reward/failed": float((scores.isnan() & applies)[:, whole].sum()),
            **{f"reward/{name}": finite_mean(scores[:, i]) for i, name in enumerate(names)},
            **{f"reward/{name}/std": finite_std(scores[:, i]) for i, name in enumerate(names) if whole[i]},
        }
        if not learns:
            return scored
        outcome = advantages(scores, applies, specs, group_ids, **self.module.advantage_options)
        first = self.trainer.global_rank * len(rollout)
        here = slice(first, first + len(rollout))
        rollout.reward = outcome.reward[here].float()
        rollout.advantages = outcome.advantages[here].float()
        rollout.valid = outcome.valid[here]
        self.metrics |= {
            "reward/mean": finite_mean(outcome.reward),
            "reward/std": finite_std(outcome.reward),
            "reward/flat_groups": outcome.flat_groups,
        }
        if len(sources) > 1:  # every source in every round, since loggers and ranks want a fixed set of names
            self.metrics |= {
                f"source/{s or 'none'}": finite_mean(outcome.reward[source_ids == i]) for i, s in enumerate(sources)
            }
        return bool(outcome.valid.any())

    def _count_unscored(self, scored: bool) -> None:
        self.unscored_rounds = 0 if scored else self.unscored_rounds + 1
        lack = "no sample got a valid reward" if self.module.needs_rewards else "no sample is finite"
        if self.unscored_rounds >= self.data.max_unscored_rounds:
            raise RuntimeError(
                f"{lack} in {self.unscored_rounds} rounds in a row (data.max_unscored_rounds); see the warnings above"
            )
        if not scored:
            rank_zero_warn(f"round {self.round}: {lack}, so it does no update")

    def _deal(self) -> list[tuple[Tensor, Tensor]]:
        """The micro-batches of the round: which samples, and which of their rows, an update at a time."""
        geometry, batches = self.data.geometry, []
        for update in split_into_updates(self.data.seed, self.round, geometry, self.trainer.global_rank):
            samples = torch.tensor(update).repeat_interleave(geometry.rows_per_sample)
            draws = torch.arange(geometry.rows_per_sample).repeat(len(update))
            batches += list(zip(samples.split(geometry.batch_size), draws.split(geometry.batch_size)))
        return batches

    def state_dict(self) -> dict[str, Any]:
        """The scalars of the round on every rank; inside a round the samples and the place in them as well."""
        mine = {
            "meter": self.module.meter.sums,
            "buffer": None if self.buffer is None else self.buffer.state_dict(),
        }
        ranks: list[Any] | None = [mine]
        if self.trainer.world_size > 1:  # called on every rank, while only rank 0 writes
            ranks = [None] * self.trainer.world_size if self.trainer.is_global_zero else None
            torch.distributed.gather_object(mine, ranks)
        return {
            "unscored_rounds": self.unscored_rounds,
            "metrics": self.metrics,
            "round": self.round,
            "position": self.position,
            "geometry": vars(self.data.geometry),
            "ranks": ranks,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a half-learnt round again.

        Raises:
            ValueError: if the round was cut in another way, by other ranks or batches.
        """
        self.unscored_rounds, self.metrics = state["unscored_rounds"], state["metrics"]
        self.round, self.position = state["round"], state["position"]
        ours, theirs = vars(self.data.geometry), state["geometry"]
        changed = [k for k in ours if k != "rollout_batch_size" and ours[k] != theirs[k]]
        inside = state["ranks"][0]["buffer"] is not None
        if inside and changed:
            raise ValueError(
                "the checkpoint was written inside a round, which cannot go on with "
                + ", ".join(f"{k} {ours[k]} instead of {theirs[k]}" for k in changed)
                + ": resume with the old values, or from a checkpoint at the end of a round"
            )
        if "world_size" not in changed:
            mine = state["ranks"][self.trainer.global_rank]
            self.module.meter.sums = mine["meter"]
            self.buffer = Rollout.from_state(mine["buffer"]) if inside else None
