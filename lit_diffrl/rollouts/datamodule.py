"""The data module: prompts in, on-policy micro-batches out, one round a trainer epoch."""

import os
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import DataLoader

from lit_diffrl.rollouts.advantages import check_specs
from lit_diffrl.rollouts.geometry import EVALUATION, Geometry
from lit_diffrl.rollouts.loader import RolloutLoader
from lit_diffrl.rollouts.prompts import Prompt, load_prompts
from lit_diffrl.rollouts.rollout import Rollout
from lit_diffrl.sampling.noise import fold


class RolloutDataModule(L.LightningDataModule):
    """Draws prompts, has the algorithm sample them, and deals out what it learns from.

    Args:
        prompts: the training prompts, a ``.txt`` file with one a line or a ``.jsonl`` file with ``prompt``, ``source``
            and metadata; ``embedded:shapes/train.jsonl`` for those that ship with the embedded model.
        val_prompts: held-out prompts that ``validate`` and the validation within ``fit`` score, one sample each.
        test_prompts: the prompts of ``test``; the validation prompts where omitted.
        predict_prompts: the prompts of ``predict``; the validation prompts where omitted.
        prompt_sources: the sources of the training prompts that are used, and of the held-out ones; all where omitted.
        prompts_per_round: prompts drawn in a round, over all ranks.
        group_size: samples of each drawn prompt, whose rewards are compared.
        rollout_batch_size: samples a rank draws at once.
        batch_size: rows a rank learns from in one forward.
        updates_per_round: optimiser steps in a round; gradients are accumulated between them.
        max_unscored_rounds: rounds without one valid reward after which the run stops. Such a round does no update.
        seed: root of all randomness in training rollouts; the one of ``seed_everything`` where omitted.
        eval_seed: root of the noise of evaluation, the same for all runs by default so that they compare.
    """

    def __init__(
        self,
        prompts: str | Path,
        val_prompts: str | Path | None = None,
        test_prompts: str | Path | None = None,
        predict_prompts: str | Path | None = None,
        prompt_sources: list[str] | None = None,
        prompts_per_round: int = 8,
        group_size: int = 8,
        rollout_batch_size: int = 16,
        batch_size: int = 16,
        updates_per_round: int = 1,
        max_unscored_rounds: int = 3,
        seed: int | None = None,
        eval_seed: int = 0,
    ) -> None:
        super().__init__()
        self.prompts = load_prompts(prompts, prompt_sources)
        self.val_prompts = load_prompts(val_prompts, prompt_sources) if val_prompts else []
        self.test_prompts = load_prompts(test_prompts, prompt_sources) if test_prompts else self.val_prompts
        self.predict_prompts = load_prompts(predict_prompts, prompt_sources) if predict_prompts else self.val_prompts
        self.prompts_per_round = prompts_per_round
        self.group_size = group_size
        self.rollout_batch_size = rollout_batch_size
        self.batch_size = batch_size
        self.updates_per_round = updates_per_round
        if max_unscored_rounds < 1:
            raise ValueError(f"data.max_unscored_rounds is {max_unscored_rounds}; it must be at least 1")
        self.max_unscored_rounds = max_unscored_rounds
        self.seed = int(os.environ.get("PL_GLOBAL_SEED", 0)) if seed is None else seed
        self.eval_seed = eval_seed
        self._geometry(rows_per_sample=1, world_size=1).check(needs_groups=False)

    def setup(self, stage: str) -> None:
        """Check the round, tell the trainer how many micro-batches make an update, and print the derived numbers."""
        trainer = self._trainer
        rewards = [c for c in trainer.callbacks if getattr(c, "is_reward", False)]  # type: ignore[attr-defined]
        module: Any = trainer.lightning_module
        needed = {"fit": module.needs_rewards or bool(self.val_prompts), "predict": False}.get(stage, True)
        if needed and not rewards:
            raise ValueError("no reward: add one under `rewards:` or to Trainer(callbacks=[...])")
        if stage != "fit":
            if not {"validate": self.val_prompts, "test": self.test_prompts, "predict": self.predict_prompts}[stage]:
                raise ValueError(f"`{stage}` needs prompts: set data.val_prompts or data.{stage}_prompts")
            return
        if module.needs_rewards:
            check_specs([reward.spec for reward in rewards], module.advantage_options["combine"])
        self.geometry = self._geometry(module.rows_per_sample, trainer.world_size)
        self.geometry.check(module.needs_groups)
        if trainer.accumulate_grad_batches not in (1, self.geometry.micro_batches):
            raise ValueError(
                f"trainer.accumulate_grad_batches is {trainer.accumulate_grad_batches}, but it follows from the data: "
                f"{self.geometry.rows_per_update} rows an update in batches of data.batch_size {self.batch_size} are "
                f"{self.geometry.micro_batches}. Leave it out, and set data.batch_size and data.updates_per_round"
            )
        trainer.accumulate_grad_batches = self.geometry.micro_batches
        rank_zero_info("One round:\n" + self.geometry.table())

    def train_dataloader(self) -> RolloutLoader:
        """The loader that collects a round on its first ``next``."""
        return RolloutLoader(self)

    def val_dataloader(self) -> DataLoader | list:
        """The held-out prompts, each with the seed of its noise."""
        return self._evaluation(self.val_prompts)

    def test_dataloader(self) -> DataLoader | list:
        """The prompts of ``test``."""
        return self._evaluation(self.test_prompts)

    def predict_dataloader(self) -> DataLoader | list:
        """The prompts of ``predict``."""
        return self._evaluation(self.predict_prompts)

    @property
    def sources(self) -> list[str]:
        """The sources of the training prompts, in alphabetical order."""
        return sorted({p.source for p in self.prompts})

    @property
    def _trainer(self) -> L.Trainer:
        if self.trainer is None:
            raise RuntimeError("RolloutDataModule is used through a Trainer: trainer.fit(algorithm, datamodule=data)")
        return self.trainer

    def _geometry(self, rows_per_sample: int, world_size: int) -> Geometry:
        return Geometry(
            self.prompts_per_round,
            self.group_size,
            self.rollout_batch_size,
            self.batch_size,
            self.updates_per_round,
            rows_per_sample,
            world_size,
        )

    def _evaluation(self, prompts: list[Prompt]) -> DataLoader | list:
        """One row a prompt, padded so that every rank holds equally many; the padding is marked by index -1.

        Lightning's sampler for several ranks would pad by counting some prompts twice.
        """
        if not prompts:
            return []
        rows = list(enumerate(prompts))
        rows += [(-1, prompts[0])] * (-len(rows) % self._trainer.world_size)
        return DataLoader(rows, batch_size=self.rollout_batch_size, collate_fn=self._collate)  # type: ignore[arg-type]

    def _collate(self, rows: list[tuple[int, Prompt]]) -> Rollout:
        ids = [i for i, _ in rows]
        return Rollout(
            [p.text for _, p in rows],
            sources=[p.source for _, p in rows],
            metadata=[p.metadata for _, p in rows],
            sample_ids=torch.tensor(ids),
            seeds=torch.tensor([fold(self.eval_seed, EVALUATION, i) for i in ids]),
        )
