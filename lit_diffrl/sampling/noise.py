"""Randomness as a function of counters: what a sample draws depends on its place in the run and on nothing else.

A draw is keyed by a seed and counters (round, sample, purpose, step), never by rank, batch or call order, so a resumed
run, another number of processes or another batch size draws the same numbers and no generator state is saved.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

# The purposes of a sample's draws, as counters, so that two of them never share numbers.
INITIAL, STEP, TRAIN_NOISE, TRAIN_TIME, TRAIN_STEPS = range(5)

_MASK = (1 << 64) - 1


def fold(seed: int, *counters: int) -> int:
    """Mix counters into a seed (the finaliser of splitmix64, once for the seed and once a counter).

    Args:
        seed: any integer.
        counters: integers that name the draw; order matters, negative ones are allowed.

    Returns:
        A seed in [0, 2^63).
    """
    x = 0x6A09E667F3BCC909  # anything but 0, which the finaliser leaves as it is
    for value in (seed, *counters):
        x = (x + 0x9E3779B97F4A7C15 * (value + 1)) & _MASK
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
        x ^= x >> 31
    return x >> 1


def generator(seed: int, *counters: int) -> torch.Generator:
    """A CPU generator for one draw."""
    return torch.Generator().manual_seed(fold(seed, *counters))


def randn(shape: Sequence[int], seeds: Sequence[int], *counters: int) -> Tensor:
    """Standard normal noise, one independent draw for each sample.

    Args:
        shape: of one sample.
        seeds: one for each sample, length B.
        counters: which of the sample's draws.

    Returns:
        (B, *shape) float32 on the CPU, equal for equal seeds whatever the batch.
    """
    return torch.stack([torch.randn(*shape, generator=generator(s, *counters), dtype=torch.float32) for s in seeds])


def rand(seeds: Sequence[int], *counters: int) -> Tensor:
    """Uniform numbers in [0, 1), one for each sample: (B,) float32 on the CPU."""
    draws = [torch.rand((), generator=generator(s, *counters), dtype=torch.float32) for s in seeds]
    return torch.stack(draws)
