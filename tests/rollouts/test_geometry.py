"""The numbers of a round."""

from dataclasses import replace

import pytest

from lit_diffrl.rollouts.geometry import Geometry, draw_prompts, permutation, sample_seed, split_into_updates

SMALL = Geometry(prompts_per_round=6, group_size=4, rollout_batch_size=5, batch_size=5, updates_per_round=2)


def test_the_numbers_of_a_round_follow_from_each_other():
    g = replace(SMALL, rows_per_sample=3, world_size=2)
    g.check()
    assert (g.samples, g.samples_per_rank, g.rows_per_update, g.micro_batches) == (24, 12, 18, 4)
    numbers = [int(line.split()[-1]) for line in g.table().splitlines()]
    assert numbers == [6, 4, 24, 2, 3, 3, 2, 4, 36]


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4, 5, 6, 7, 100])
def test_micro_batches_hold_all_rows_with_the_last_one_smaller(batch_size):
    g = replace(SMALL, batch_size=batch_size)
    full, rest = divmod(12, batch_size)
    assert g.micro_batches == full + (rest > 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompts_per_round": 0}, "data.prompts_per_round is 0; it must be at least 1"),
        ({"updates_per_round": 0}, "data.updates_per_round is 0"),
        ({"batch_size": -1}, "data.batch_size is -1"),
        ({"group_size": 1}, "data.group_size is 1: .* at least 2"),
        ({"prompts_per_round": 9, "group_size": 2, "world_size": 4}, r"9 x data.group_size 2 = 18 samples .* 4 ranks"),
        ({"updates_per_round": 5}, r"24 samples on each of 1 ranks .*updates_per_round 5: choose a divisor of 24"),
        ({"updates_per_round": 8, "world_size": 2}, r"12 samples on each of 2 ranks .*updates_per_round 8"),
    ],
)
def test_numbers_that_do_not_divide_are_refused_with_all_of_them(change, message):
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **change).check()


def test_algorithms_without_groups_take_single_samples():
    replace(SMALL, group_size=1).check(needs_groups=False)


@pytest.mark.parametrize("per_round", [1, 3, 4, 10, 25])
def test_every_prompt_is_drawn_once_before_one_is_drawn_again(per_round):
    total, drawn = 10, []
    for round_ in range(12):
        drawn += draw_prompts(7, round_, per_round, total)
    for first in range(0, len(drawn) - total + 1, total):
        assert sorted(drawn[first : first + total]) == list(range(total))
    assert drawn[:total] != list(range(total))


def test_passes_over_the_prompts_differ_and_follow_from_the_seed():
    orders = [tuple(draw_prompts(seed, round_, 10, 10)) for seed in (0, 1) for round_ in range(5)]
    assert len(set(orders)) == 10
    assert draw_prompts(1, 3, 10, 10) == list(orders[8])


@pytest.mark.parametrize("updates", [1, 2, 3, 6])
def test_the_split_into_updates_is_the_same_for_any_number_of_ranks(updates):
    unions = []
    for world_size in (1, 2, 4):
        g = replace(SMALL, updates_per_round=updates, world_size=world_size)
        g.check()
        union: list[list[int]] = [[] for _ in range(updates)]
        for rank in range(world_size):
            split = split_into_updates(5, 3, g, rank)
            assert {len(part) for part in split} == {g.samples_per_rank // updates}
            assert sorted(i for part in split for i in part) == list(range(g.samples_per_rank))
            for whole, part in zip(union, split):
                whole += [rank * g.samples_per_rank + i for i in part]
        unions.append(union)
    assert unions[0] == unions[1] == unions[2]


@pytest.mark.parametrize("updates", [2, 4])
def test_every_update_gets_its_share_of_every_group(updates):
    for part in split_into_updates(0, 0, replace(SMALL, updates_per_round=updates), 0):
        groups = [i // SMALL.group_size for i in part]
        assert all(groups.count(g) == SMALL.group_size // updates for g in range(SMALL.prompts_per_round))


def test_the_split_differs_between_rounds():
    splits = {tuple(map(tuple, split_into_updates(0, r, SMALL, 0))) for r in range(6)}
    assert len(splits) == 6


def test_seeds_of_samples_do_not_repeat_over_rounds_and_seeds():
    seeds = {sample_seed(s, r, i) for s in range(3) for r in range(50) for i in range(64)}
    assert len(seeds) == 3 * 50 * 64


def test_a_permutation_holds_everything_once_and_is_fair():
    first = [0] * 4
    for i in range(4000):
        p = permutation(4, 0, i)
        assert sorted(p) == [0, 1, 2, 3]
        first[p[0]] += 1
    assert all(abs(n - 1000) < 120 for n in first)
