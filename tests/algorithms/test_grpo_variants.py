"""What DanceGRPO, MixGRPO and the options of Flow-GRPO change: which steps are stochastic, from which noise, and KL."""

from collections import Counter

import pytest
import torch
from torch import Tensor

from lit_diffrl.algorithms import DanceGRPO, FlowGRPO, MixGRPO
from lit_diffrl.sampling import Kernel
from lit_diffrl.sampling.noise import INITIAL, STEP, randn
from tests.algorithms.test_flash_grpo import (
    TEN,
    attach,
    blank,
    draw,
    euler,
    even,
    fit,
    kept_steps,
    learn,
    toy,
)
from tests.algorithms.test_losses import Replayed, flow, gradient, make, normal, transitions
from tests.algorithms.toy import SHAPE

GRID = torch.tensor(TEN)


def variant(algorithm, num_steps: int = 10, rank: int = 0, world_size: int = 1, **options):
    """An algorithm in a run of five groups of four samples."""
    module = make(algorithm, sigmas=even(num_steps).tolist(), **options)
    return attach(module, rank, world_size=world_size)


def apart(x: Tensor) -> float:
    """The least distance between two rows."""
    x = x.flatten(1)
    return (torch.cdist(x, x) + 99 * torch.eye(len(x))).min().item()


def by_group(x: Tensor) -> Tensor:
    return x.view(5, 4, -1)


# -- DanceGRPO -------------------------------------------------------------------------------------------------------


def dance_step(x: Tensor, v: Tensor, k: int, eta: float) -> tuple[Tensor, float]:
    """Mean and deviation of the k-th step, by way of the score."""
    s, dt = GRID[k], GRID[k + 1] - GRID[k]
    score = -(x - (1 - s) * (x - s * v)) / s**2
    return x + v * dt - 0.5 * eta**2 * score * dt, eta * (-dt).sqrt().item()


def test_dance_takes_all_steps_but_the_last_with_one_diffusion_coefficient():
    module = variant(DanceGRPO, steps_per_sample=9)
    rollout = draw(module)
    kept = rollout.transitions
    assert torch.equal(kept_steps(module, rollout), torch.arange(9).expand(20, -1))
    x = kept["latents"][:, 0]
    for k in range(9):
        torch.testing.assert_close(kept["latents"][:, k], x, atol=1e-5, rtol=0)
        v = module.velocity(x, (1000 * GRID[k]).expand(20), rollout.prompts).detach()
        mean, std = dance_step(x, v, k, 0.3)
        noise = randn(SHAPE, rollout.seeds.tolist(), STEP, k)
        torch.testing.assert_close((kept["next_latents"][:, k] - mean) / std, noise, atol=1e-4, rtol=0)
        x = mean + std * noise
    final = euler(module, x, rollout.prompts, 9, 10)
    torch.testing.assert_close(rollout.media, module.policy.decode(final, module.size), atol=1e-5, rtol=0)


def test_each_sample_of_dance_keeps_different_steps_in_order_from_the_given_range():
    module = attach(make(DanceGRPO, sigmas=TEN, steps_per_sample=3, window_range=(2, 8)), prompts_per_round=100)
    rollout = blank(module)
    plan = module.plan(rollout, 0)
    assert plan.kept.shape == (400, 3)
    assert plan.stochastic.sum(0).tolist() == [0, 0, *[400] * 6, 0, 0]
    assert (plan.kept.diff(dim=1) > 0).all() and plan.kept.min() == 2 and plan.kept.max() == 7
    counts = Counter(plan.kept.flatten().tolist())
    assert all(abs(counts[k] - 200) < 60 for k in range(2, 8))  # no step is preferred
    assert len({tuple(steps) for steps in plan.kept.tolist()}) == 20  # all subsets of three of six
    members = by_group(plan.kept[:20].float())
    assert all(len({tuple(m) for m in group.tolist()}) > 1 for group in members)
    for first in range(0, 400, 7):  # the same for any batch
        part = module.plan(rollout[first : first + 7], 0)
        assert torch.equal(part.kept, plan.kept[first : first + 7])
    assert not torch.equal(module.plan(blank(module, 1), 1).kept, plan.kept)


def test_transitions_of_dance_are_those_of_the_steps_that_were_drawn():
    whole, some = variant(DanceGRPO, steps_per_sample=9), variant(DanceGRPO, steps_per_sample=4)
    every, few = draw(whole), draw(some, batch=3)
    steps = kept_steps(some, few)
    assert len({tuple(row) for row in steps.tolist()}) > 5
    torch.testing.assert_close(few.media, every.media, atol=1e-5, rtol=0)  # what is kept changes nothing drawn
    for name, ours in few.transitions.items():
        theirs = every.transitions[name][torch.arange(20)[:, None], steps]
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-5, msg=name)


@pytest.mark.parametrize(
    ("num_steps", "trained"),
    [
        (16, 9),  # 0.6 of 15, the FLUX and HunyuanVideo recipes
        (25, 14),  # NFE of DanceGRPO in table 1 of MixGRPO: int(0.6 * 24), as the released code rounds
        (2, 1),
    ],
)
def test_dance_trains_on_0_6_of_the_steps_as_the_released_code(num_steps, trained):
    module = make(DanceGRPO, sigmas=even(num_steps).tolist())
    assert module.steps_per_sample == module.rows_per_sample == trained


def test_dance_of_a_range_trains_on_0_6_of_the_range():
    assert make(DanceGRPO, sigmas=TEN, window_range=(1, 6)).steps_per_sample == 3


def test_a_sample_of_dance_costs_as_many_backwards_as_it_keeps_steps(prompt_file):
    module = toy(DanceGRPO, steps_per_sample=4)
    run = fit(module, prompt_file, batch_size=5)
    assert module.backward_rows == 2 * 12 * 4
    assert run.callback_metrics["train/first_ratio_deviation_max"] <= 1e-5


def test_before_the_first_update_the_ratios_of_dance_are_one():
    module = variant(DanceGRPO)
    loss, metrics = module.loss(learn(draw(module), 1.0))
    assert metrics["first_ratio_deviation_max"].max() < 1e-5
    assert loss.tolist() == pytest.approx([-1] * len(loss), abs=1e-5)


# -- one noise a group -----------------------------------------------------------------------------------------------


def initial(algorithm, round_: int = 0, batch: int | None = None, **options) -> Tensor:
    """The initial latents of a round, whose first step is stochastic and kept."""
    module = variant(algorithm, window_range=(0, 3), **options)
    rollout = draw(module, round_, batch)
    assert (kept_steps(module, rollout)[:, 0] == 0).all()
    return rollout.transitions["latents"][:, 0]


KEEP_FIRST = [(DanceGRPO, {"steps_per_sample": 3}), (MixGRPO, {"window": 2}), (FlowGRPO, {})]


@pytest.mark.parametrize(("algorithm", "options"), KEEP_FIRST)
def test_with_shared_noise_a_group_starts_from_one_point_and_each_group_from_its_own(algorithm, options):
    x = initial(algorithm, shared_noise=True, **options)
    groups = by_group(x)
    assert torch.equal(groups, groups[:, :1].expand_as(groups)) and apart(groups[:, 0]) > 0.1
    assert torch.equal(initial(algorithm, batch=3, shared_noise=True, **options), x)  # however many at once
    halves = [initial(algorithm, rank=r, world_size=2, shared_noise=True, **options) for r in (0, 1)]
    assert torch.equal(torch.cat(halves), x)  # the third group is on both ranks
    assert apart(torch.stack([x.flatten(), initial(algorithm, 1, shared_noise=True, **options).flatten()])) > 1


@pytest.mark.parametrize(("algorithm", "options"), KEEP_FIRST)
def test_shared_noise_is_the_default_of_dance_and_mix_only(algorithm, options):
    groups = by_group(initial(algorithm, **options))
    assert torch.equal(groups[:, 0], groups[:, 1]) == (algorithm is not FlowGRPO)
    assert apart(initial(algorithm, shared_noise=False, **options)) > 0.1


@pytest.mark.parametrize("algorithm", [DanceGRPO, MixGRPO, FlowGRPO])
def test_samples_that_share_their_start_differ_by_the_noise_of_their_steps(algorithm):
    module = variant(algorithm, shared_noise=True)
    assert apart(draw(module).media) > 1e-3


@pytest.mark.parametrize("algorithm", [DanceGRPO, MixGRPO])
def test_evaluation_has_a_noise_for_each_sample_and_no_stochastic_step(algorithm):
    module = variant(algorithm, shared_noise=True)
    rollout = blank(module)
    start = randn(SHAPE, rollout.seeds.tolist(), INITIAL)
    final = euler(module, start, rollout.prompts, 0, 10)
    media = module.evaluate(rollout).media
    torch.testing.assert_close(media, module.policy.decode(final, module.size), atol=1e-6, rtol=0)
    assert apart(media) > 1e-3


# -- MixGRPO ---------------------------------------------------------------------------------------------------------


def starts(rounds, num_steps: int = 25, **options) -> list[int]:
    module = variant(MixGRPO, num_steps=num_steps, **options)
    return [module.window_start(round_) for round_ in rounds]


def test_the_window_of_mix_has_the_published_size_and_moves_by_one_step_every_25_rounds():
    module = variant(MixGRPO, num_steps=25)
    assert (module.window, module.shift_every, module.stride, module.wrap) == (4, 25, 1, False)
    assert starts([0, 24, 25, 49, 50, 499, 500]) == [0, 0, 1, 1, 2, 19, 20]


def test_the_window_stays_at_its_last_place():
    # The steps 20 to 23; the last of the 25 steps is deterministic always.
    assert starts([500, 525, 10_000]) == [20, 20, 20]
    assert starts(range(5), num_steps=10, window=2, shift_every=1, stride=3) == [0, 3, 6, 7, 7]
    assert starts(range(5), num_steps=10, window=2, shift_every=1, window_range=(2, 6)) == [2, 3, 4, 4, 4]
    assert starts(range(3), num_steps=5, shift_every=1) == [0, 0, 0]  # no place to go


def test_a_window_that_wraps_begins_again_at_the_noisy_end():
    assert starts([500, 524, 525, 549, 550, 1050], wrap=True) == [20, 20, 0, 0, 1, 0]
    options = {"num_steps": 10, "window": 2, "window_range": (2, 6), "shift_every": 1}
    assert starts(range(7), wrap=True, **options) == [2, 3, 4, 2, 3, 4, 2]


def test_a_window_that_wraps_begins_at_the_noisy_end_at_a_stride_that_misses_the_last_place_too():
    options = {"num_steps": 10, "window": 2, "window_range": (0, 6), "shift_every": 1}
    assert starts(range(7), stride=3, wrap=True, **options) == [0, 3, 0, 3, 0, 3, 0]


def test_all_ranks_have_the_window_of_the_round():
    for round_ in (0, 30, 1000):
        plans = []
        for rank in (0, 1):
            module = variant(MixGRPO, rank=rank, world_size=2)
            plans.append(module.plan(blank(module, round_), round_))
        for plan in plans:
            first = min(round_ // 25, 5)
            assert torch.equal(plan.kept, torch.arange(first, first + 4).expand(10, -1))
            assert torch.equal(plan.stochastic.nonzero()[:, 1].view(10, 4), plan.kept)


def test_steps_of_mix_outside_the_window_are_those_of_the_deterministic_flow():
    module = variant(MixGRPO, window=3)
    rollout = draw(module, 50)  # the window begins at the third step
    kept, prompts = rollout.transitions, rollout.prompts
    assert torch.equal(kept_steps(module, rollout), torch.arange(2, 5).expand(20, -1))
    start = randn(SHAPE, module.initial_seeds(rollout, 50), INITIAL)
    x = euler(module, start, prompts, 0, 2)
    assert torch.equal(by_group(x)[:, 0], by_group(x)[:, 3])  # up to the window the samples of a group are one
    for slot, k in enumerate((2, 3, 4)):
        torch.testing.assert_close(kept["latents"][:, slot], x, atol=1e-5, rtol=0)
        a, b, std = flow(TEN, k, 0.7)
        v = module.velocity(x, (1000 * GRID[k]).expand(20), prompts).detach()
        x = a * x + b * v + std * randn(SHAPE, rollout.seeds.tolist(), STEP, k)
        torch.testing.assert_close(kept["next_latents"][:, slot], x, atol=1e-5, rtol=0)
    final = euler(module, x, prompts, 5, 10)
    torch.testing.assert_close(rollout.media, module.policy.decode(final, module.size), atol=1e-5, rtol=0)


def test_the_window_of_mix_moves_in_a_run_and_costs_its_size(prompt_file):
    module, seen = toy(MixGRPO, window=2, shift_every=2), []

    def loss(batch):
        seen.append((module.loader.round, sorted(set(batch.transitions["sigma"].tolist()), reverse=True)))
        return MixGRPO.loss(module, batch)

    module.loss = loss
    fit(module, prompt_file, batch_size=24, trainer={"max_epochs": 3})
    levels = module.schedule().sigmas.tolist()
    assert seen == [(0, levels[:2]), (1, levels[:2]), (2, levels[1:3])]
    assert module.backward_rows == 3 * 12 * 2


# -- the divergence from the reference -------------------------------------------------------------------------------


def closed_form(mode: str, k: int, v: Tensor, reference: Tensor) -> Tensor:
    """The divergence at the k-th step of the toy's grid, from the means and deviations of the transitions."""
    sigmas = [1.0, 0.9, 0.7, 0.4, 0.0]
    if mode == "velocity":
        return ((v - reference) ** 2).mean()
    _, b, std = flow(sigmas, k, 0.7)
    shift = ((b * (v - reference)) ** 2).mean()
    length = sigmas[k] - sigmas[k + 1]
    return shift / (2 * std**2) if mode == "transition" else shift / (2 * std**2 / length)


@pytest.mark.parametrize("mode", ["transition", "transition_no_dt", "velocity"])
def test_the_divergence_is_that_of_its_mode_with_gradients_of_the_policy_alone(mode):
    module = make(Replayed, kl=0.5, kl_mode=mode, clip=1e-3)
    batch, _ = transitions(module, [0.0, 0.0, 0.0])  # without advantages the divergence is the loss
    calls, velocity = [], module.velocity

    def watched(*args, role="default", **options):
        v = velocity(*args, role=role, **options)
        calls.append((role, v.requires_grad))
        return v

    module.velocity = watched
    loss, metrics = module.loss(batch)
    assert calls == [("default", True), ("reference", False)]
    kept = batch.transitions
    v = velocity(kept["latents"], kept["timestep"], batch.prompts).double()
    reference = module.frozen_velocity("reference", kept["latents"], kept["timestep"], batch.prompts).double()
    expected = torch.stack([closed_form(mode, k, v[k], reference[k]) for k in range(3)])
    assert expected.min() > 5e-5
    torch.testing.assert_close(metrics["kl"].double(), expected, atol=0, rtol=1e-4)
    torch.testing.assert_close(loss.double(), 0.5 * expected, atol=0, rtol=1e-4)
    for ours, theirs in zip(loss, 0.5 * expected):
        ours, theirs = gradient(ours, module.policy), gradient(theirs, module.policy)
        torch.testing.assert_close(ours, theirs, atol=1e-4 * theirs.abs().max().item(), rtol=0)


def test_the_divergence_of_the_step_is_the_default_and_half_the_squared_gain_times_the_velocity_mode():
    found = {}
    for mode in ("transition", "transition_no_dt", "velocity", None):
        module = make(Replayed, kl=1.0, **({"kl_mode": mode} if mode else {}))
        batch, _ = transitions(module, [0.0, 0.0, 0.0])
        found[mode] = module.loss(batch)[1]["kl"].detach()
        step, kept = module.transition(batch.transitions), batch.transitions
    assert torch.equal(found[None], found["transition"])
    torch.testing.assert_close(found["transition"], 0.5 * step.gain.flatten() ** 2 * found["velocity"])
    torch.testing.assert_close(found["transition_no_dt"], found["transition"] * (kept["sigma"] - kept["sigma_next"]))


@pytest.mark.parametrize("mode", ["transition", "transition_no_dt", "velocity"])
def test_the_divergence_is_zero_at_the_reference_and_is_not_weighted_by_step(mode):
    losses = []
    for step_weight in ("uniform", "inverse_gain"):
        module = make(Replayed, kl=0.5, kl_mode=mode, step_weight=step_weight)
        batch, _ = transitions(module, [0.0, 0.0, 0.0])
        losses.append(module.loss(batch)[0])
    assert torch.equal(*losses)
    module.policy.roles.follow("reference", 0.0)
    loss, metrics = module.loss(batch)
    assert (metrics["kl"] == 0).all() and (gradient(loss.sum(), module.policy) == 0).all()


@pytest.mark.parametrize("mode", ["transition", "transition_no_dt", "velocity"])
def test_without_a_divergence_there_is_no_reference_and_no_forward_of_it(mode):
    rows_of = {}
    for kl in (0.0, 0.1):
        module = make(Replayed, kl=kl, kl_mode=mode)
        batch, _ = transitions(module, [1.0, -1.0, 0.5])
        before = module.forward_rows, module.backward_rows
        _, metrics = module.loss(batch)
        rows_of[kl] = module.forward_rows - before[0], module.backward_rows - before[1]
        assert ("reference" in module.policy.roles.names) == ("kl" in metrics) == (kl > 0)
    assert rows_of == {0.0: (3, 3), 0.1: (6, 3)}


# -- GRPO-Guard ------------------------------------------------------------------------------------------------------


def test_the_guard_takes_the_bias_and_the_dependence_on_the_step_out_of_the_log_ratio():
    """The same shift of the mean at two steps, over many draws of the noise."""
    n, shift = 100_000, 0.03 * normal(8)
    module, sigmas, spreads = make(Replayed, guard=True), torch.tensor([1.0, 0.9, 0.7, 0.4, 0.0]).double(), []
    for k in (1, 3):
        step = Kernel("flow", 0.7).transition(sigmas[k : k + 1], sigmas[k + 1 : k + 2] + 1e-3, sigmas, 2)
        noise, velocity = normal(n, 8, seed=k), normal(1, 8, seed=9)
        moved = velocity + shift / step.b
        mean, x = step.mean(torch.zeros(1, 8).double(), velocity), torch.zeros(1, 8).double()
        x_next = mean + step.std * noise
        log_ratio = step.log_prob(x_next, step.mean(x, moved)) - step.log_prob(x_next, mean)
        bias = -(shift**2).mean() / (2 * step.std**2)
        assert log_ratio.mean().item() == pytest.approx(bias.item(), abs=4 * log_ratio.std().item() / n**0.5)
        guarded = module.guarded(log_ratio, step, moved, velocity)
        assert abs(guarded.mean().item()) < 4 * guarded.std().item() / n**0.5
        spreads.append((log_ratio.std().item(), guarded.std().item()))
    assert spreads[0][0] / spreads[1][0] < 0.8
    assert spreads[0][1] == pytest.approx(spreads[1][1], rel=0.02)
    assert spreads[0][1] == pytest.approx(shift.norm().item() / 8, rel=0.02)


# -- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "options", "message"),
    [
        (DanceGRPO, {"steps_per_sample": 0}, "model.steps_per_sample is 0; it must lie between 1 and the 3 steps"),
        (DanceGRPO, {"steps_per_sample": 4}, r"model.steps_per_sample is 4; .* 3 steps of the range \[0, 3\]"),
        (DanceGRPO, {"steps_per_sample": 3, "window_range": (1, 3)}, r"the 2 steps of the range \[1, 3\]"),
        (DanceGRPO, {"window_range": (0, 4)}, r"model.window_range is \[0, 4\]"),
        (DanceGRPO, {"eta": 0.0}, "model.eta is 0.0"),
        (DanceGRPO, {"solver": "dpm2"}, "stochastic steps need 'euler'"),
        (MixGRPO, {}, "model.window is 4; it must lie between 1 and the 3 steps"),  # of a grid of four steps
        (MixGRPO, {"window": 0}, "model.window is 0"),
        (MixGRPO, {"window": 2, "shift_every": 0}, "model.shift_every is 0"),
        (MixGRPO, {"window": 2, "stride": 0}, "model.stride is 0"),
        (MixGRPO, {"window": 3, "window_range": (1, 3)}, "model.window is 3; it must lie between 1 and the 2 steps"),
        (MixGRPO, {"window": 2, "solver": "dpm2"}, "stochastic steps need 'euler'"),
        # Either makes steps equally strong: both together would not.
        (FlowGRPO, {"guard": True, "step_weight": "inverse_gain"}, "model.step_weight is 'inverse_gain'; model.guard"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(algorithm, options, message):
    with pytest.raises(ValueError, match=message):
        make(algorithm, **options)


def test_dance_has_no_window_to_set():
    with pytest.raises(TypeError, match="'window'"):
        make(DanceGRPO, window=2)
