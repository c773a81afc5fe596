"""The numbers of a round, derived and checked before anything is loaded."""

from dataclasses import dataclass
from functools import lru_cache

import torch

from lit_diffrl.sampling.noise import fold, generator

# Names of the shared control draws of a run.
PROMPT_ORDER, SPLIT, EVALUATION = -1, -2, -3


@dataclass(frozen=True)
class Geometry:
    """How many samples, rows, micro-batches and updates a round has.

    Args:
        prompts_per_round: prompts drawn in a round, over all ranks.
        group_size: samples of each drawn prompt.
        rollout_batch_size: samples that a rank draws at once.
        batch_size: rows that a rank learns from in one forward.
        updates_per_round: optimiser steps in a round.
        rows_per_sample: rows that the algorithm makes of each sample (transitions, noise draws or groups of them).
        world_size: ranks.
    """

    prompts_per_round: int
    group_size: int
    rollout_batch_size: int
    batch_size: int
    updates_per_round: int
    rows_per_sample: int = 1
    world_size: int = 1

    def check(self, needs_groups: bool = True) -> None:
        """Refuse what does not divide.

        Args:
            needs_groups: whether advantages compare the samples of a group.

        Raises:
            ValueError: with the numbers, and what would be valid.
        """
        for name in ("prompts_per_round", "group_size", "rollout_batch_size", "batch_size", "updates_per_round"):
            if getattr(self, name) < 1:
                raise ValueError(f"data.{name} is {getattr(self, name)}; it must be at least 1")
        if needs_groups and self.group_size < 2:
            raise ValueError(
                f"data.group_size is {self.group_size}: the advantage compares a sample with its group, so it must be "
                "at least 2"
            )
        if self.samples % self.world_size:
            raise ValueError(
                f"a round of data.prompts_per_round {self.prompts_per_round} x data.group_size {self.group_size} = "
                f"{self.samples} samples does not divide over {self.world_size} ranks"
            )
        if self.samples_per_rank % self.updates_per_round:
            raise ValueError(
                f"{self.samples_per_rank} samples on each of {self.world_size} ranks do not divide into "
                f"data.updates_per_round {self.updates_per_round}: choose a divisor of {self.samples_per_rank}"
            )

    @property
    def samples(self) -> int:
        """Samples of a round, over all ranks."""
        return self.prompts_per_round * self.group_size

    @property
    def samples_per_rank(self) -> int:
        """Samples that one rank draws."""
        return self.samples // self.world_size

    @property
    def rows_per_update(self) -> int:
        """Rows that one rank learns from before an optimiser step."""
        return self.samples_per_rank // self.updates_per_round * self.rows_per_sample

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one update, the last of which may be smaller: the gradients to accumulate."""
        return -(-self.rows_per_update // self.batch_size)

    def table(self) -> str:
        """The derived numbers, one a line, for the start of a run."""
        rows = {
            "prompts a round": self.prompts_per_round,
            "samples a prompt (group)": self.group_size,
            "samples a round": self.samples,
            "ranks": self.world_size,
            "rollout batches a rank": -(-self.samples_per_rank // self.rollout_batch_size),
            "rows a sample": self.rows_per_sample,
            "updates a round": self.updates_per_round,
            "micro-batches an update": self.micro_batches,
            "rows an update, all ranks": self.rows_per_update * self.world_size,
        }
        width = max(len(k) for k in rows)
        return "\n".join(f"  {k:<{width}}  {v:>6}" for k, v in rows.items())


def draw_prompts(seed: int, round_: int, prompts_per_round: int, total: int) -> list[int]:
    """Which prompts a round draws: passes over all prompts, each pass in an order of its own.

    A function of the seed and the round alone, equal on all ranks.
    """
    first = round_ * prompts_per_round
    drawn = []
    for position in range(first, first + prompts_per_round):
        pass_, place = divmod(position, total)
        drawn.append(permutation(total, seed, PROMPT_ORDER, pass_)[place])
    return drawn


def split_into_updates(seed: int, round_: int, geometry: Geometry, rank: int) -> list[list[int]]:
    """Which of a rank's samples each update of a round learns from, as local indices.

    Every run of ``updates_per_round`` consecutive samples gives one to each update, at random: all ranks then hold
    equally many, each update sees its share of every group, and the split does not depend on the number of ranks.
    """
    updates: list[list[int]] = [[] for _ in range(geometry.updates_per_round)]
    first = rank * geometry.samples_per_rank
    for block in range(geometry.samples_per_rank // geometry.updates_per_round):
        start = first + block * geometry.updates_per_round
        order = permutation(geometry.updates_per_round, seed, SPLIT, round_, start // geometry.updates_per_round)
        for update, place in zip(updates, order):
            update.append(start + place - first)
    return updates


@lru_cache(maxsize=64)
def permutation(n: int, seed: int, *counters: int) -> tuple[int, ...]:
    """A shared random order of ``n`` things."""
    return tuple(torch.randperm(n, generator=generator(seed, *counters)).tolist())


def sample_seed(seed: int, round_: int, sample_id: int) -> int:
    """The seed of all draws of one sample of a round."""
    return fold(seed, round_, sample_id)
