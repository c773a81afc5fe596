"""AWM: the flow-matching error as a log-likelihood, its weightings, levels, anchors and the ratio of two policies."""

from types import SimpleNamespace

import lightning as L
import pytest
import torch
from torch import Tensor

from lit_diffrl.algorithms import AWM
from lit_diffrl.algorithms.awm import weighted_error
from lit_diffrl.algorithms.rvm import velocity_matching
from lit_diffrl.rollouts import Rollout
from tests.algorithms.test_flash_grpo import TEN, fit, toy
from tests.algorithms.test_losses import clean, gradient, make, normal, recorded, rows
from tests.algorithms.toy import SHAPE

PLAIN = {"sigmas": TEN, "ema_beta": 0.0}
WEIGHTINGS = ["uniform", "t", "t2", "huber", "ghuber"]
POWER = 0.25


def w(weighting: str, error: Tensor, t: Tensor) -> Tensor:
    """The table of weightings, without the constants that keep it finite at no error."""
    return {
        "uniform": error,
        "t": t * error,
        "t2": t**2 * error,
        "huber": t * error.sqrt(),
        "ghuber": t / POWER * error**POWER,
    }[weighting]


def slope(weighting: str, error: Tensor, t: Tensor) -> Tensor:
    """Its derivative by the error."""
    return {
        "uniform": torch.ones_like(error),
        "t": t,
        "t2": t**2,
        "huber": t / (2 * error.sqrt()),
        "ghuber": t * error ** (POWER - 1),
    }[weighting]


def velocities(module, x, batch) -> tuple[Tensor, Tensor]:
    """The velocity of the policy, and its error."""
    v = module.velocity(x.latents, x.timestep, batch.prompts)
    return v, rows((v - x.target) ** 2)


# -- weightings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_weighted_errors_and_their_slopes_are_those_of_the_table(weighting):
    error, t = normal(50).exp().requires_grad_(), torch.linspace(0.02, 1, 50).double()
    value = weighted_error(error, t, weighting, POWER)
    offset = {"huber": 1e-5, "ghuber": 1e-10**POWER / POWER}.get(weighting, 0.0)
    torch.testing.assert_close(value.detach(), w(weighting, error, t).detach() - offset * t, atol=1e-8, rtol=0)
    (g,) = torch.autograd.grad(value.sum(), error)
    torch.testing.assert_close(g, slope(weighting, error, t).detach(), atol=0, rtol=1e-7)


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_no_error_weighs_nothing_and_has_a_finite_slope(weighting):
    error = torch.zeros(3).double().requires_grad_()
    value = weighted_error(error, torch.tensor([0.1, 0.5, 1.0]).double(), weighting, POWER)
    (g,) = torch.autograd.grad(value.sum(), error)
    assert (value == 0).all() and g.isfinite().all()


def test_the_generalised_huber_is_t_times_the_error_at_power_one_and_twice_the_huber_at_one_half():
    error, t = normal(50).exp(), torch.linspace(0.02, 1, 50).double()
    one, half = (weighted_error(error, t, "ghuber", p) for p in (1.0, 0.5))
    torch.testing.assert_close(one, weighted_error(error, t, "t"), atol=1e-14, rtol=1e-14)
    torch.testing.assert_close(half, 2 * weighted_error(error, t, "huber"), atol=0, rtol=1e-14)


def test_the_default_is_the_generalised_huber_of_power_a_quarter():
    module = make(AWM, sigmas=TEN)
    assert (module.weighting, module.power) == ("ghuber", 0.25)


# -- on-policy -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("advantage_max", [1.0, 2.0])
@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_on_policy_the_ratio_is_one_and_the_gradient_that_of_the_weighted_error(weighting, advantage_max):
    module = make(AWM, weighting=weighting, advantage_max=advantage_max, **PLAIN)
    batch = clean([2.0, -5.0, 0.5, 0.0])
    loss, metrics, x = recorded(module, batch)
    a = advantage_max * torch.tensor([0.4, -1.0, 0.1, 0.0])  # advantages in units of their bound of 5
    torch.testing.assert_close(loss.detach(), -a, atol=1e-7, rtol=0)
    assert (metrics["clip_fraction"] == 0).all()
    v, error = velocities(module, x, batch)
    torch.testing.assert_close(metrics["error"], error)
    factor = (a * slope(weighting, error, x.level)).detach().view(-1, 1, 1, 1)
    by_hand = (factor * 2 / v[0].numel() * (v - x.target)).detach()  # A dw/dl (2/D) (v - v*)
    for i in range(4):
        expected = gradient((by_hand[i] * v[i]).sum(), module.policy)
        ours = gradient(loss[i], module.policy)
        torch.testing.assert_close(ours, expected, atol=1e-4 * expected.abs().max().item(), rtol=0)
    assert by_hand[:3].abs().amax((1, 2, 3)).min() > 1e-3


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_on_policy_it_is_velocity_matching_with_factors_of_level_and_error(weighting):
    """The relation of the specification: r of RVM is 2 A dw/dl, an anchor of weight beta one of weight 2 beta."""
    module = make(AWM, weighting=weighting, sigmas=TEN, kl=0.3, ema_beta=0.2)
    module.policy.roles.follow("ema", 0.5)
    batch = clean([2.0, -5.0, 0.5])
    loss, _, x = recorded(module, batch)
    v, error = velocities(module, x, batch)
    anchors = [
        (2 * beta, module.frozen_velocity(role, x.latents, x.timestep, batch.prompts))
        for role, beta in (("reference", 0.3), ("ema", 0.2))
    ]
    r = (2 * batch.advantages / 5 * slope(weighting, error, x.level)).detach()
    rvm = velocity_matching(v, x.target, r, *anchors)
    for ours, theirs in zip(loss, rvm):
        ours, theirs = gradient(ours, module.policy), gradient(theirs, module.policy)
        torch.testing.assert_close(ours, theirs, atol=1e-4 * theirs.abs().max().item(), rtol=0)


def test_good_samples_attract_and_bad_ones_repel():
    for advantage, sign in ((5.0, -1), (-5.0, 1)):
        module, batch = make(AWM, **PLAIN), clean([advantage])
        loss, metrics = module.loss(batch)
        g = torch.autograd.grad(loss.sum(), list(module.policy.transformer.parameters()))
        for p, slope_ in zip(module.policy.transformer.parameters(), g):
            p.data -= 0.1 * slope_
        assert (module.loss(batch)[1]["error"] - metrics["error"]).item() * sign > 1e-3


# -- off-policy ------------------------------------------------------------------------------------------------------


class Begun(AWM):
    """In the first update of a round, without a trainer that would say so."""

    update_in_round = 0


class Later(AWM):
    """In a later one."""

    update_in_round = 1


def off_policy(**options):
    """A policy that has moved since it drew the round."""
    module = make(Later, off_policy=True, **PLAIN, **options)
    module.on_round_start(0)
    module.policy.move(4, 0.2)
    return module


def ratios(module, x, batch, weighting: str) -> Tensor:
    _, error = velocities(module, x, batch)
    old = rows((module.frozen_velocity("old", x.latents, x.timestep, batch.prompts) - x.target) ** 2)
    return (w(weighting, old, x.level) - w(weighting, error, x.level)).exp()


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_off_policy_the_ratio_compares_with_the_policy_that_drew_at_the_same_level_and_noise(weighting):
    module, batch = off_policy(weighting=weighting, clip=50.0), clean([5.0, -5.0, 2.5])
    loss, _, x = recorded(module, batch)
    ratio = ratios(module, x, batch, weighting)
    assert ((ratio - 1).abs() > 1e-3).all()
    expected = -torch.tensor([1.0, -1.0, 0.5]) * ratio
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-4)
    ours, theirs = (gradient(y.sum(), module.policy) for y in (loss, expected))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_off_policy_only_ratios_on_the_far_side_are_clipped():
    seen = set()
    for sign in (1.0, -1.0):
        module = off_policy(clip=1e-2)
        batch = clean([5 * sign] * 8)
        loss, metrics, x = recorded(module, batch)
        for i, r in enumerate(ratios(module, x, batch, "ghuber").tolist()):
            done = r > 1.01 if sign > 0 else r < 0.99
            seen.add((sign, done))
            assert loss[i].item() == pytest.approx(-sign * (min(max(r, 0.99), 1.01) if done else r), abs=1e-4)
            assert (gradient(loss[i], module.policy).abs().max() > 1e-6) == (not done)
            assert metrics["clip_fraction"][i].item() == float(abs(r - 1) > 0.01)
    assert len(seen) == 4


def test_off_policy_is_on_policy_until_the_first_update():
    losses = []
    for off in (False, True):
        module = make(Begun, off_policy=off, **PLAIN)
        module.on_round_start(3)
        loss, _ = module.loss(clean([2.0, -3.0]))
        assert module.forward_rows == 2  # the old policy is this one: no need to ask it
        losses.append((loss, gradient(loss.sum(), module.policy)))
    assert all(torch.equal(a, b) for a, b in zip(*losses))


def test_the_old_policy_is_renewed_every_round_and_the_reference_never():
    module = make(AWM, off_policy=True, kl=0.1, **PLAIN)
    copies, start = module.policy.roles.copies, module.policy.roles.copies["reference"].weight.clone()
    for round_ in range(2):
        module.policy.move(round_)
        module.on_round_start(round_)
        assert torch.equal(copies["old"].weight, module.policy.transformer.weight)
        assert torch.equal(copies["reference"].weight, start)


# -- anchors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("role", "option"), [("reference", "kl"), ("ema", "ema_beta")])
def test_an_anchor_adds_the_squared_distance_of_the_velocities_times_its_weight(role, option):
    module, batch = make(AWM, **(PLAIN | {option: 0.3})), clean([2.0, -3.0])
    loss, metrics, x = recorded(module, batch)
    anchor = module.frozen_velocity(role, x.latents, x.timestep, batch.prompts)
    v, _ = velocities(module, x, batch)
    distance = rows((v - anchor) ** 2)
    assert distance.min() > 1e-2
    torch.testing.assert_close(metrics[f"distance_{role}"], distance)
    torch.testing.assert_close(loss, -batch.advantages / 5 + 0.3 * distance, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "roles", "forwards"),
    [
        ({}, [], 1),
        ({"kl": 0.1}, ["reference"], 2),
        ({"ema_beta": 0.1}, ["ema"], 2),
        ({"off_policy": True}, ["old"], 2),
        ({"kl": 0.1, "ema_beta": 0.1, "off_policy": True}, ["reference", "ema", "old"], 4),
    ],
)
def test_only_what_is_needed_is_copied_and_run(options, roles, forwards):
    module = make(Later, **(PLAIN | options))
    module.loss(clean([1.0, -1.0, 0.5]))
    assert set(module.policy.roles.copies) == set(module.role_names) == set(roles)
    assert (module.forward_rows, module.backward_rows) == (3 * forwards, 3)


@pytest.mark.parametrize(
    ("updates", "decay"), [(0, 0.0), (1, 0.001), (100, 0.1), (299, 0.299), (301, 0.3), (100_000, 0.3)]
)
def test_the_average_follows_with_a_decay_that_grows_by_update(updates, decay):
    module = make(AWM, sigmas=TEN)
    module._trainer = SimpleNamespace(global_step=updates)
    ema, ours = module.policy.roles.copies["ema"].weight, module.policy.transformer.weight
    start = ema.clone()
    module.on_round_start(0)
    assert torch.equal(ema, start)  # nothing has been learnt yet
    module.on_round_start(1)
    torch.testing.assert_close(ema, decay * start + (1 - decay) * ours, atol=1e-6, rtol=0)


class Averages(L.Callback):
    """The policy and its average at the ends of updates, and as a round is drawn."""

    def __init__(self):
        self.learnt, self.drawn = [], []

    def state(self, module):
        ours, ema = module.policy.transformer.weight, module.policy.roles.copies["ema"].weight
        return module.global_step, ours.detach().clone(), ema.detach().clone()

    def on_rollout_start(self, trainer, module, total):
        self.drawn.append(self.state(module))

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.learnt.append(self.state(module))


def test_in_a_run_the_average_moves_once_a_round(prompt_file):
    module, seen = toy(AWM, ema_rate=0.1, ema_decay=0.3, draws_per_sample=2), Averages()
    fit(module, prompt_file, seen, lr=0.5, batch_size=12, updates_per_round=2, trainer={"max_epochs": 4})
    assert [n for n, *_ in seen.learnt] == [1, 2, 3, 4, 5, 6, 7, 8] and [n for n, *_ in seen.drawn] == [0, 2, 4, 6]
    average = seen.drawn[0][2]
    assert torch.equal(average, seen.drawn[0][1])  # a copy of the start
    for round_, (updates, ours, ema) in enumerate(seen.drawn):
        if round_ > 0:
            decay = min(0.1 * updates, 0.3)
            average = decay * average + (1 - decay) * ours
        torch.testing.assert_close(ema, average, atol=1e-6, rtol=0)
        for *_, later in seen.learnt[2 * round_ : 2 * round_ + 2]:
            assert torch.equal(later, ema)  # and not by update
    assert (seen.drawn[3][1] - seen.drawn[3][2]).abs().max() > 1e-4


# -- levels ----------------------------------------------------------------------------------------------------------


def many(module, samples: int = 300) -> Rollout:
    """All draws of many samples."""
    draws = module.draws_per_sample
    return Rollout(
        ["p"] * (samples * draws),
        seeds=torch.arange(samples).repeat_interleave(draws),
        draws=torch.arange(draws).repeat(samples),
        latents=torch.zeros(samples * draws, *SHAPE),
        advantages=torch.ones(samples * draws),
    )


@pytest.mark.parametrize(
    ("draws", "strata"),
    [
        (8, [[k] for k in range(1, 9)]),
        (4, [[1, 2], [3, 4], [5, 6], [7, 8]]),
        (2, [[1, 2, 3, 4], [5, 6, 7, 8]]),
        (1, [[*range(1, 9)]]),
        (3, [[1, 2, 3], [4, 5], [6, 7, 8]]),
        (6, [[1], [2, 3], [4], [5], [6, 7], [8]]),
    ],
)
def test_draws_of_a_sample_lie_in_strata_of_their_own_within_the_inner_grid(draws, strata):
    module = make(AWM, sigmas=TEN, draws_per_sample=draws)
    assert module.rows_per_sample == draws
    levels = recorded(module, many(module))[2].level.view(300, draws)
    grid = torch.tensor(TEN)
    assert [k for stratum in strata for k in stratum] == [*range(1, 9)]  # neither the first level nor the last one
    for draw, stratum in enumerate(strata):
        found, counts = levels[:, draw].unique(return_counts=True)
        assert torch.equal(found, grid[stratum].sort().values)
        assert counts.min() > 300 / len(stratum) / 2  # evenly
    if draws in (2, 4):  # draws of one sample know nothing of each other
        inside = (levels - levels.mean(0)) / levels.std(0)
        assert abs((inside[:, 0] * inside[:, 1]).mean().item()) < 0.2


@pytest.mark.parametrize("num_steps", [3, 4, 9, 14, 40])
def test_any_number_of_draws_that_the_grid_allows_has_strata_that_are_not_empty(num_steps):
    sigmas = torch.linspace(1, 0, num_steps + 1).tolist()
    for draws in range(1, num_steps - 1):
        module = make(AWM, sigmas=sigmas, draws_per_sample=draws)
        levels = module.levels(many(module, 5)).view(5, draws)
        assert (levels.diff(dim=1) < 0).all()
        assert levels.max() <= sigmas[1] and levels.min() >= sigmas[-3]


def test_levels_depend_on_the_sample_and_the_draw_alone():
    module = make(AWM, sigmas=TEN, draws_per_sample=4)
    batch = many(module, 20)
    levels = module.levels(batch)
    order = torch.randperm(80, generator=torch.Generator().manual_seed(0))
    assert torch.equal(module.levels(batch[order]), levels[order])
    assert len({tuple(row) for row in levels.view(20, 4).tolist()}) > 5


def test_uniform_levels_fill_the_unit_interval():
    module = make(AWM, sigmas=TEN, times="uniform", draws_per_sample=2)
    levels = recorded(module, many(module, 2000))[2].level.view(2000, 2)
    for draw in range(2):
        counts = torch.histc(levels[:, draw], 10, 0, 1)
        assert counts.min() > 140 and counts.max() < 260
    assert torch.corrcoef(levels.T)[0, 1].abs() < 0.07


@pytest.mark.parametrize(("steps", "draws"), [(14, 6), (8, 6), (7, 5), (3, 1)])
def test_six_draws_a_sample_are_the_default_or_as_many_as_the_grid_has(steps, draws):
    sigmas = torch.linspace(1, 0, steps + 1).tolist()
    assert make(AWM, sigmas=sigmas).draws_per_sample == draws
    assert make(AWM, sigmas=sigmas, times="uniform").draws_per_sample == 6


# -- runs ------------------------------------------------------------------------------------------------------------


class Noted(AWM):
    """Notes the losses and advantages of each micro-batch."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = []

    def loss(self, batch):
        loss, metrics = super().loss(batch)
        self.seen.append((self.loader.round, self.update_in_round, loss.detach(), batch.advantages))
        return loss, metrics


@pytest.mark.parametrize("off", [False, True])
def test_in_a_run_ratios_leave_one_with_the_second_update_and_off_policy_only(prompt_file, off):
    module = toy(Noted, off_policy=off, ema_beta=0.0, draws_per_sample=2)
    fit(module, prompt_file, lr=0.1, batch_size=12, updates_per_round=2)
    moved = {}
    for round_, update, loss, advantages in module.seen:
        learns = advantages != 0
        moved[round_, update] = (loss[learns] / (-advantages[learns] / 5) - 1).abs().max().item()
    assert len(moved) == 4
    assert all(moved[round_, 0] < 1e-6 for round_ in range(2))
    assert all((moved[round_, 1] > 1e-4) == off for round_ in range(2))


def test_a_sample_costs_a_deterministic_rollout_and_its_draws(prompt_file):
    module = toy(AWM, draws_per_sample=3)
    fit(module, prompt_file, batch_size=5)
    assert module.backward_rows == 2 * 12 * 3
    assert module.forward_rows == 2 * 12 * (10 + 3 + 3)  # the steps, and the draws of the policy and of its average


# -- settings --------------------------------------------------------------------------------------------------------


def test_advantages_are_scaled_by_the_deviation_of_the_whole_round():
    assert make(AWM, sigmas=TEN).advantage_options["std"] == "global"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"power": 0.0}, "model.power is 0.0"),
        ({"advantage_max": 0.0}, "model.advantage_max is 0.0"),
        ({"clip": 0.0}, "model.clip is 0.0"),
        ({"kl": -0.1}, "model.kl is -0.1"),
        ({"ema_beta": -1.0}, "model.ema_beta -1.0"),
        ({"ema_rate": -1.0}, "model.ema_rate -1.0"),
        ({"ema_decay": 1.0}, "model.ema_decay 1.0"),
        ({"draws_per_sample": 0}, "model.draws_per_sample is 0"),
        ({"draws_per_sample": 9}, "model.draws_per_sample is 9; .* at most 8, the levels of model.num_steps 10"),
        ({"sigmas": [1.0, 0.5, 0.0]}, "model.num_steps is 2; model.times 'grid' .* at least 3"),
        ({"times": "uniform", "draws_per_sample": 0}, "model.draws_per_sample is 0"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        make(AWM, **({"sigmas": TEN} | options))


def test_uniform_levels_need_no_grid_to_choose_from():
    assert make(AWM, sigmas=[1.0, 0.5, 0.0], times="uniform", draws_per_sample=9).rows_per_sample == 9
