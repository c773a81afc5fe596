"""From rewards to advantages, against printed numbers."""

import math

import pytest
import torch

from lit_diffrl.rollouts.advantages import Advantages, advantages
from lit_diffrl.rollouts.rollout import RewardSpec

ONE = [RewardSpec()]
REWARDS, GROUPS = [1, 4, 2, 4, 3, 4, 6, 4], [0, 1, 0, 1, 0, 1, 0, 1]
X = math.nan


def compare(rewards, groups, specs=ONE, applies=None, **options) -> Advantages:
    rewards = torch.tensor(rewards, dtype=torch.float64)
    rewards = rewards[:, None] if rewards.ndim == 1 else rewards
    applies = torch.ones_like(rewards, dtype=torch.bool) if applies is None else torch.tensor(applies)
    return advantages(rewards, applies, specs, torch.tensor(groups), **options)


def close(result: Advantages, expected: list[float], atol: float = 1e-5) -> None:
    torch.testing.assert_close(result.advantages, torch.tensor(expected, dtype=torch.float64), atol=atol, rtol=0)


@pytest.mark.parametrize(
    ("std", "expected"),
    [
        ("group", [-1.06899, 0, -0.53449, 0, 0, 0, 1.60348, 0]),
        ("global", [-1.41411, 0, -0.70706, 0, 0, 0, 2.12117, 0]),
        ("none", [-2, 0, -1, 0, 0, 0, 3, 0]),
    ],
)
def test_advantages_are_centred_on_their_group_and_scaled_by_the_population_deviation(std, expected):
    result = compare(REWARDS, GROUPS, std=std)
    close(result, expected, 6e-6)
    assert all((a == 0) == (e == 0) for a, e in zip(result.advantages.tolist(), expected))  # zeros are exact
    assert result.flat_groups == 0.5
    assert result.reward.tolist() == REWARDS
    assert result.advantages.dtype == torch.float64


def test_a_failed_sample_does_not_move_its_siblings():
    result = compare([0.9, X, 0.1, 0.5], [0, 0, 0, 0])
    close(result, [1.2244, 0, -1.2244, 0], 5e-5)
    assert result.advantages[1] == 0
    assert result.valid.tolist() == [True, False, True, True]
    assert result.reward[1].isnan() and result.reward[[0, 2, 3]].tolist() == [0.9, 0.1, 0.5]
    without = compare([0.9, 0.1, 0.5], [0, 0, 0])
    assert torch.equal(result.advantages[[0, 2, 3]], without.advantages)


@pytest.mark.parametrize("combine", ["sum", "normalized"])
@pytest.mark.parametrize("std", ["group", "global", "none"])
@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e6 + 0.1, -7.7])
def test_flat_groups_are_exactly_zero_where_the_mean_would_round(combine, std, value):
    rewards = [value] * 7 + [1.0, 2.0]
    result = compare(rewards, [0] * 7 + [1, 1], combine=combine, std=std)
    assert (result.advantages[:7] == 0).all()
    assert (result.advantages[7:] != 0).all()
    assert result.flat_groups == 0.5


def test_permuting_samples_permutes_their_advantages():
    torch.manual_seed(0)
    rewards, groups = torch.randn(24, 2).double(), torch.arange(24) // 4
    rewards[5, 1] = X
    order, applies = torch.randperm(24), torch.ones(24, 2, dtype=torch.bool)
    specs = [RewardSpec(1.0), RewardSpec(0.3)]
    for options in ({}, {"combine": "normalized"}, {"std": "global"}, {"combine": "normalized", "std": "global"}):
        a = advantages(rewards, applies, specs, groups, **options)
        b = advantages(rewards[order], applies, specs, groups[order], **options)
        torch.testing.assert_close(a.advantages[order], b.advantages, atol=1e-12, rtol=0)
        assert torch.equal(a.valid[order], b.valid) and a.flat_groups == b.flat_groups


def test_names_of_groups_mean_nothing():
    assert torch.equal(compare(REWARDS, GROUPS).advantages, compare(REWARDS, [9 - 7 * g for g in GROUPS]).advantages)


def test_two_draws_of_one_prompt_are_two_groups():
    one = compare([0.0, 1.0, 10.0, 11.0], [0, 0, 0, 0]).advantages
    two = compare([0.0, 1.0, 10.0, 11.0], [0, 0, 1, 1]).advantages
    assert two[0].item() == pytest.approx(-1, abs=1e-3) and two[2].item() == pytest.approx(-1, abs=1e-3)
    assert one[2] > 0


def test_a_scaled_and_shifted_reward_has_the_same_advantages():
    a = compare(REWARDS, GROUPS).advantages
    b = compare([15 * r + 3 for r in REWARDS], GROUPS).advantages
    torch.testing.assert_close(a, b, atol=0, rtol=1e-4)


def test_a_constant_on_one_prompt_changes_no_numerator():
    shifted = [r + 100 * g for r, g in zip(REWARDS, GROUPS)]
    assert torch.equal(compare(REWARDS, GROUPS, std="none").advantages, compare(shifted, GROUPS, std="none").advantages)
    assert compare(shifted, GROUPS, std="global").advantages[6] < 0.1  # but the global deviation sees it


def test_global_deviation_keeps_the_scale_of_groups_and_group_deviation_removes_it():
    rewards, groups = [0.0, 1.0, 0.0, 100.0], [0, 0, 1, 1]
    everywhere = compare(rewards, groups, std="global").advantages
    assert (everywhere[3] / everywhere[1]).item() == pytest.approx(100, rel=1e-9)
    within = compare(rewards, groups, std="group").advantages
    assert (within[3] / within[1]).item() == pytest.approx(1, rel=1e-3)


@pytest.mark.parametrize("std", ["group", "global", "none"])
def test_advantages_of_a_group_sum_to_zero(std):
    torch.manual_seed(1)
    result = compare(torch.randn(12).tolist(), [0] * 5 + [1] * 7, std=std)
    for group in (slice(0, 5), slice(5, 12)):
        assert result.advantages[group].sum().abs() < 1e-12


def test_a_spread_far_below_eps_is_not_blown_up():
    tiny = compare([0.0, 1e-7], [0, 0])
    assert 0 < tiny.advantages[1] < 1e-3


def test_the_sum_is_dominated_by_the_reward_of_the_larger_spread_and_normalized_is_not():
    torch.manual_seed(2)
    rewards = torch.randn(48 * 24, 2).double() * torch.tensor([0.012, 0.35])  # PickScore and OCR, as in flow_grpo
    groups, specs = [i // 24 for i in range(len(rewards))], [RewardSpec(), RewardSpec()]

    within = rewards - rewards.view(48, 24, 2).mean(1).repeat_interleave(24, 0)

    def correlations(combine: str) -> list[float]:
        a = compare(rewards.tolist(), groups, specs, combine=combine).advantages
        return [torch.corrcoef(torch.stack([a, within[:, i]]))[0, 1].item() for i in range(2)]

    pick, ocr = correlations("sum")
    assert pick < 0.15 and ocr > 0.98
    pick, ocr = correlations("normalized")
    assert pick == pytest.approx(0.72, abs=0.06) and ocr == pytest.approx(0.72, abs=0.06)


def test_normalized_is_invariant_to_an_affine_change_of_one_reward():
    torch.manual_seed(3)
    rewards = torch.randn(16, 2).double() * 3
    groups, specs = [i // 4 for i in range(16)], [RewardSpec(2.0), RewardSpec(0.5)]
    changed = rewards * torch.tensor([1.0, 1000.0]) + torch.tensor([0.0, 7.0])
    for std in ("group", "global"):
        options = {"combine": "normalized", "std": std}
        a, b = (compare(r.tolist(), groups, specs, **options).advantages for r in (rewards, changed))
        torch.testing.assert_close(a, b, atol=1e-3, rtol=0)
    a, b = (compare(r.tolist(), groups, specs, combine="sum").advantages for r in (rewards, changed))
    assert (a - b).abs().max() > 0.1


def test_normalized_weights_count_after_the_scaling():
    rewards = [[0.0, 50.0], [1.0, 30.0], [2.0, 10.0]]  # both of unit shape, the second in reverse
    result = compare(rewards, [0, 0, 0], [RewardSpec(3.0), RewardSpec(1.0)], combine="normalized", std="none")
    scaled = math.sqrt(1.5) * (3 - 1)
    close(result, [-scaled, 0, scaled], 1e-3)


def test_a_flat_reward_adds_nothing_to_the_normalized_sum():
    with_flat = compare(
        [[r, 0.1] for r in REWARDS], GROUPS, [RewardSpec(), RewardSpec(5.0)], combine="normalized"
    ).advantages
    assert torch.equal(with_flat, compare(REWARDS, GROUPS, combine="normalized").advantages)


def test_a_reward_with_a_negative_weight_is_a_penalty():
    assert torch.equal(compare(REWARDS, GROUPS, [RewardSpec(-1.0)]).advantages, -compare(REWARDS, GROUPS).advantages)


@pytest.mark.parametrize("combine", ["sum", "normalized"])
def test_a_reward_of_weight_zero_is_watched_and_may_fail(combine):
    rewards = [[r, X] for r in REWARDS]
    result = compare(rewards, GROUPS, [RewardSpec(), RewardSpec(0.0)], combine=combine)
    assert torch.equal(result.advantages, compare(REWARDS, GROUPS, combine=combine).advantages)
    assert result.valid.all()


@pytest.mark.parametrize("combine", ["sum", "normalized"])
def test_an_absent_reward_is_neither_zero_nor_a_failure(combine):
    rewards = [[1.0, X], [2.0, X], [1.0, 5.0], [2.0, 3.0]]
    applies = [[True, False], [True, False], [True, True], [True, True]]
    specs = [RewardSpec(), RewardSpec(2.0)]
    result = compare(rewards, [0, 0, 1, 1], specs, applies, combine=combine)
    assert result.valid.all()
    assert result.reward.tolist() == [1, 2, 11, 8]
    assert result.advantages[1] > 0 > result.advantages[0]
    assert result.advantages[2] > 0 > result.advantages[3]
    missing = compare(rewards, [0, 0, 1, 1], specs, combine=combine)  # the same scores, but the reward should be there
    assert missing.valid.tolist() == [False, False, True, True]
    assert missing.advantages[:2].tolist() == [0, 0]


def test_a_sample_to_which_no_reward_applies_is_not_valid():
    result = compare([[1.0], [X], [3.0]], [0, 0, 0], applies=[[True], [False], [True]])
    assert result.valid.tolist() == [True, False, True]
    close(result, [-1, 0, 1], 2e-4)


def test_infinite_scores_are_failures():
    result = compare([1.0, math.inf, 3.0, -math.inf], [0] * 4)
    assert result.valid.tolist() == [True, False, True, False]
    close(result, [-1, 0, 1, 0], 2e-4)


@pytest.mark.parametrize("std", ["group", "global", "none"])
@pytest.mark.parametrize("combine", ["sum", "normalized"])
def test_groups_of_fewer_than_two_valid_samples_are_flat(std, combine):
    result = compare([1.0, X, X, X, 3.0, 5.0], [0, 0, 1, 1, 2, 2], std=std, combine=combine)
    assert result.advantages[:4].tolist() == [0, 0, 0, 0]
    assert (result.advantages[4:] != 0).all()
    assert result.flat_groups == pytest.approx(2 / 3)


@pytest.mark.parametrize("std", ["group", "global", "none"])
def test_a_round_without_any_valid_sample_has_no_advantages_and_no_nan(std):
    result = compare([X, X, X, X], [0, 0, 1, 1], std=std)
    assert result.advantages.tolist() == [0, 0, 0, 0]
    assert not result.valid.any() and result.reward.isnan().all()
    assert result.flat_groups == 1


def test_advantages_are_clipped_on_both_sides():
    rewards = [0.0] * 63 + [1.0] + [0.0] * 63 + [-1.0]
    groups = [0] * 64 + [1] * 64
    assert compare(rewards, groups).advantages[[63, 127]].tolist() == [5, -5]
    assert compare(rewards, groups, clip=2.0).advantages[[63, 127]].tolist() == [2, -2]
    free = compare(rewards, groups, clip=None).advantages[63].item()
    assert free == pytest.approx(math.sqrt(63), rel=2e-3)


GATED = [RewardSpec(1.0), RewardSpec(1.0, gate=0.5)]


def test_a_sample_that_misses_the_gate_gets_the_least_sum_of_its_group():
    rewards = [[9.0, 0.4], [1.0, 0.5], [2.0, 0.9], [3.0, 1.0]]
    result = compare(rewards, [0] * 4, GATED, combine="gated", std="none")
    close(result, [-0.75, -0.75, 0.25, 1.25], 1e-12)  # of 1, 1, 2, 3: the gate itself adds nothing
    assert result.reward.tolist() == [9, 1, 2, 3]


def test_a_gate_that_does_not_apply_is_passed_and_one_that_failed_masks():
    rewards = [[9.0, X], [1.0, 0.5], [2.0, X], [3.0, 1.0]]
    applies = [[True, False], [True, True], [True, True], [True, True]]
    result = compare(rewards, [0] * 4, GATED, applies, combine="gated", std="none")
    assert result.valid.tolist() == [True, True, False, True]
    close(result, [9 - 13 / 3, 1 - 13 / 3, 0, 3 - 13 / 3], 1e-12)


@pytest.mark.parametrize(
    ("specs", "combine", "message"),
    [
        ([RewardSpec()], "gated", "combine is 'gated', but no reward has a `gate`"),
        (GATED, "sum", "a reward has `gate: 0.5`, which combine 'sum' does not use"),
        (GATED, "normalized", "which combine 'normalized' does not use"),
        ([RewardSpec(0.0)], "sum", "nothing is left to learn from"),
        ([RewardSpec(1.0, gate=0.5)], "gated", "nothing is left to learn from"),
    ],
)
def test_sets_of_rewards_that_teach_nothing_are_refused(specs, combine, message):
    with pytest.raises(ValueError, match=message):
        compare([[1.0] * len(specs)] * 2, [0, 0], specs, combine=combine)
