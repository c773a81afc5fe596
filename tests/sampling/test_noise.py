"""Draws as a function of counters."""

from itertools import product

import pytest
import torch

from lit_diffrl.sampling.noise import INITIAL, STEP, TRAIN_NOISE, TRAIN_TIME, fold, generator, rand, randn


def test_a_draw_does_not_depend_on_its_batch_or_its_place_in_it():
    together = randn((2, 3), [7, 8, 9], STEP, 4)
    assert torch.equal(together.flip(0), randn((2, 3), [9, 8, 7], STEP, 4))
    assert torch.equal(together[1:2], randn((2, 3), [8], STEP, 4))
    assert torch.equal(rand([7, 8, 9], TRAIN_TIME)[2:], rand([9], TRAIN_TIME))


def test_a_draw_does_not_depend_on_the_global_generator():
    torch.manual_seed(0)
    first = randn((4,), [1], INITIAL)
    before = torch.get_rng_state()
    second = randn((4,), [1], INITIAL)
    assert torch.equal(first, second)
    assert torch.equal(before, torch.get_rng_state())


def test_seeds_purposes_and_steps_give_different_draws():
    counters = [(INITIAL,), (TRAIN_NOISE,), (TRAIN_TIME,), *((STEP, k) for k in range(20))]
    draws = torch.cat([randn((8,), list(range(10)), *c) for c in counters])
    gaps = torch.cdist(draws, draws) + 10 * torch.eye(len(draws))
    assert gaps.min() > 0.3


def test_draws_of_neighbouring_seeds_are_independent_standard_normals():
    x = randn((100,), list(range(1000)), STEP, 0).double()
    assert x.mean().abs() < 4 / 1e5**0.5
    assert (x.var() - 1).abs() < 4 * (2 / 1e5) ** 0.5
    assert ((x[:-1] * x[1:]).mean()).abs() < 4 / 1e5**0.5  # one seed and the next
    assert (x.abs() < 1).double().mean().item() == pytest.approx(0.6827, abs=0.006)


def test_uniform_draws_cover_the_unit_interval_evenly():
    u = rand(list(range(20_000)), TRAIN_TIME).double()
    assert u.min() >= 0 and u.max() < 1
    assert u.mean().item() == pytest.approx(0.5, abs=4 * (1 / 12 / 2e4) ** 0.5)
    counts = torch.histc(u, 10, 0, 1)
    assert ((counts - 2000) ** 2 / 2000).sum() < 28  # chi-squared, 9 degrees: p = 0.001


def test_folding_has_no_collisions_over_a_grid_of_counters():
    keys = {fold(seed, r, i, k) for seed, r, i, k in product(range(3), range(30), range(60), range(-3, 12))}
    assert len(keys) == 3 * 30 * 60 * 15


def test_folding_tells_the_order_and_the_number_of_counters_apart():
    assert fold(0, 1, 2) != fold(0, 2, 1)
    assert len({fold(0), fold(0, 0), fold(0, 0, 0), fold(1), fold(0, 1), fold(0, -1), fold(-1)}) == 7


@pytest.mark.parametrize("which", ["seed", "counter"])
def test_one_flipped_bit_changes_half_of_the_seed(which):
    changed = []
    for value, bit in product(range(200), range(16)):
        other = value ^ (1 << bit)
        a, b = (fold(value, 5), fold(other, 5)) if which == "seed" else (fold(5, value), fold(5, other))
        changed.append((a ^ b).bit_count())
    assert sum(changed) / len(changed) == pytest.approx(31.5, abs=0.5)
    assert min(changed) > 8


def test_a_folded_seed_is_one_that_a_generator_takes():
    for seed in (0, -1, 2**63 - 1, -(2**63), 123):
        assert 0 <= fold(seed, 1) < 2**63
    first, second = (torch.rand(3, generator=generator(3, -10, 2)) for _ in range(2))
    assert torch.equal(first, second)
