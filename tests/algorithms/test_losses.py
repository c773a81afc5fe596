"""Losses against formulas written down again, their gradients, and the identities between algorithms."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from lit_diffrl.algorithms import RVM, DiffusionNFT, FlowGRPO
from lit_diffrl.algorithms.matching import Noised
from lit_diffrl.algorithms.nft import lag
from lit_diffrl.algorithms.rvm import velocity_matching
from lit_diffrl.rollouts import Rollout
from lit_diffrl.sampling.noise import randn
from tests.algorithms.toy import SHAPE, ToyPolicy

SIGMAS = [1.0, 0.9, 0.7, 0.4, 0.0]


def make(algorithm, **options):
    """An algorithm around the toy policy, at weights that are those of no role."""
    sigmas = options.pop("sigmas", SIGMAS)
    module = algorithm(ToyPolicy(sigmas), num_steps=len(sigmas) - 1, **options)
    module.configure_model()
    module.policy.move()
    return module


def rows(x: Tensor) -> Tensor:
    return x.flatten(1).mean(1)


def gradient(loss: Tensor, policy: ToyPolicy) -> Tensor:
    """Of the weights in training, in one vector."""
    weights = list(policy.transformer.parameters())
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, weights, retain_graph=True)])


def descend_once(loss: Tensor, policy: ToyPolicy, rate: float) -> None:
    weights = list(policy.transformer.parameters())
    for p, g in zip(weights, torch.autograd.grad(loss, weights)):
        p.data -= rate * g


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def clean(advantages: list[float], draws: list[int] | None = None) -> Rollout:
    """A micro-batch of clean samples."""
    n = len(advantages)
    return Rollout(
        [f"p{'x' * i}" for i in range(n)],
        seeds=torch.arange(n) + 50,
        latents=randn(SHAPE, [900 + i for i in range(n)]),
        advantages=torch.tensor(advantages),
        draws=torch.tensor(draws or [0] * n),
    )


# -- velocity matching -----------------------------------------------------------------------------------------------


def literal(v, target, r, beta, anchor):
    """1/2 (r |v - v*|^2 + beta |v - v_anchor|^2), as the paper writes it."""
    return 0.5 * (r * rows((v - target) ** 2) + beta * rows((v - anchor) ** 2))


def slope(v, *args):
    """The gradient of velocity matching with respect to each row's velocity."""
    v = v.detach().requires_grad_()
    return torch.autograd.grad(velocity_matching(v, *args).sum(), v)[0] * v[0].numel()


def test_the_detached_form_has_the_gradient_of_the_signed_one():
    v, target, anchor = (normal(6, 3, 2, seed=i) for i in range(3))
    v.requires_grad_()
    r, beta = torch.tensor([0.5, -0.5, 0.1, -0.1, 0.0, 0.3]).double(), 0.2
    loss, g = velocity_matching(v, target, r, (beta, anchor)), slope(v, target, r, (beta, anchor))
    by_hand = r[:, None, None] * (v - target) + beta * (v - anchor)
    torch.testing.assert_close(g, by_hand.detach(), atol=1e-14, rtol=0)
    torch.testing.assert_close(loss.detach(), 0.5 * rows(by_hand**2).detach(), atol=1e-14, rtol=0)
    ours = torch.autograd.grad(loss.sum(), v)[0]
    torch.testing.assert_close(ours, by_hand.detach() / 6, atol=1e-14, rtol=0)
    theirs = torch.autograd.grad(literal(v, target, r, beta, anchor).sum(), v)[0]
    torch.testing.assert_close(ours, theirs, atol=1e-14, rtol=0)


def test_several_anchors_with_weights_of_their_own_add_up():
    v, target, one, two = (normal(3, 4, seed=i) for i in range(4))
    betas = torch.tensor([0.1, 0.2, 0.3]).double()
    g = slope(v, target, torch.zeros(3).double(), (betas, one), (2.0, two))
    torch.testing.assert_close(g, betas[:, None] * (v - one) + 2 * (v - two), atol=1e-14, rtol=0)


def test_ram_is_velocity_matching_with_the_reference_as_anchor_of_weight_one():
    v, target, reference = (normal(5, 4, seed=i) for i in range(3))
    v.requires_grad_()
    r = normal(5, seed=9)
    ram = 0.5 * rows((v - (reference + r[:, None] * (target - v)).detach()) ** 2)
    ours = velocity_matching(v, target, r, (1.0, reference))
    a, b = (torch.autograd.grad(x.sum(), v)[0] for x in (ram, ours))
    torch.testing.assert_close(a, b, atol=1e-14, rtol=0)


def test_the_unified_form_has_the_same_gradient():
    v, target, anchor = (normal(5, 4, seed=i) for i in range(3))
    v.requires_grad_()
    r, beta = normal(5, seed=9), 0.3
    c, a = r + beta, r / (r + beta)
    unified = 0.5 * c * rows(((v - anchor) - a[:, None] * (target - anchor)) ** 2)
    ours = velocity_matching(v, target, r, (beta, anchor))
    a, b = (torch.autograd.grad(x.sum(), v)[0] for x in (unified, ours))
    torch.testing.assert_close(a, b, atol=1e-13, rtol=0)


@pytest.mark.parametrize(("t", "expected"), [(0.2, 0.294), (0.5, 1.0), (0.8, 1.176)])
def test_the_mean_gradient_tilts_a_gaussian_by_its_reward(t, expected):
    """x_0 ~ N(0, 1) and r = x_0: minus the covariance of r and the velocity, t / ((1-t)^2 + t^2)."""
    x_0, noise = normal(400_000, 1), normal(400_000, 1, seed=1)
    x_t = (1 - t) * x_0 + t * noise
    consistent = (2 * t - 1) / ((1 - t) ** 2 + t**2) * x_t
    g = slope(consistent, noise - x_0, x_0[:, 0])
    assert g.mean().item() == pytest.approx(expected, abs=0.015)


def descend(r: float, beta: float, steps: int = 400) -> tuple[Tensor, Tensor, Tensor]:
    target, anchor = normal(1, 4, seed=1), normal(1, 4, seed=2)
    v = normal(1, 4, seed=3).requires_grad_()
    for _ in range(steps):
        loss = velocity_matching(v, target, torch.tensor([r]).double(), (beta, anchor))
        v.data -= 2.0 * torch.autograd.grad(loss.sum(), v)[0]
    return v.detach(), target, anchor


def test_bad_samples_run_away_without_an_anchor_that_outweighs_them():
    v, target, anchor = descend(-0.2, 0.1)
    assert v.abs().max() > 1e6
    v, target, anchor = descend(-0.2, 0.3)
    torch.testing.assert_close(v, (-0.2 * target + 0.3 * anchor) / 0.1, atol=1e-6, rtol=0)


# -- RVM -------------------------------------------------------------------------------------------------------------


def test_noised_samples_lie_on_the_straight_path_and_depend_on_their_draw_alone():
    module, batch = make(RVM), clean([1.0, 1.0, 1.0])
    level = torch.tensor([0.25, 0.5, 1.0])
    x = module.renoise(batch, level)
    noise = x.target + batch.latents
    t = level.view(-1, 1, 1, 1)
    torch.testing.assert_close(x.latents, (1 - t) * batch.latents + t * noise, atol=1e-6, rtol=0)
    assert torch.equal(x.timestep, torch.tensor([250.0, 500.0, 1000.0])) and torch.equal(x.level, level)
    alone = module.renoise(batch[torch.tensor([2])], level[2:])
    assert torch.equal(alone.latents[0], x.latents[2])
    again = clean([1.0, 1.0, 1.0], draws=[1, 0, 0])
    other = module.renoise(again, level).target + again.latents
    assert (other[0] - noise[0]).abs().max() > 0.1 and torch.equal(other[1:], noise[1:])
    assert noise.std() > 0.5 and (noise[0] - noise[1]).abs().max() > 0.1


def recorded(module, batch):
    """The loss, and what went through the network for it: velocity, target, level."""
    seen = []

    def renoise(batch, level):
        seen.append(type(module).renoise(module, batch, level))
        return seen[-1]

    module.renoise = renoise
    loss, metrics = module.loss(batch)
    return loss, metrics, seen[-1]


@pytest.mark.parametrize("anchor", ["reference", "ema", "old"])
def test_rvm_matches_velocities_with_signed_weights_and_an_anchor(anchor):
    module, batch = make(RVM, beta=0.2, anchor=anchor, shaping=0.1), clean([2.0, -3.0, 0.5])
    loss, metrics, x = recorded(module, batch)
    v = module.velocity(x.latents, x.timestep, batch.prompts)
    anchored = module.frozen_velocity(anchor, x.latents, x.timestep, batch.prompts)
    assert (v - anchored).abs().max() > 0.1
    r = 0.1 * batch.advantages
    expected = literal(v, x.target, r, 0.2, anchored)
    torch.testing.assert_close(
        gradient(loss.sum(), module.policy), gradient(expected.sum(), module.policy), atol=1e-6, rtol=1e-5
    )
    torch.testing.assert_close(metrics["signed_loss"], 0.5 * r * rows((v - x.target) ** 2), atol=1e-6, rtol=0)


def test_the_anchor_of_rvm_can_be_guided():
    module, batch = make(RVM, beta=1.0, anchor_guidance_scale=3.0, negative_prompt="no"), clean([0.0, 0.0])
    x = module.renoise(batch, torch.tensor([0.5, 0.5]))
    (weight, guided), *_ = module.anchors(x.latents, x.timestep, batch.prompts)
    cond = module.frozen_velocity("reference", x.latents, x.timestep, batch.prompts, guidance_scale=1)
    uncond = module.frozen_velocity("reference", x.latents, x.timestep, ["no", "no"], guidance_scale=1)
    assert weight == 1
    torch.testing.assert_close(guided, uncond + 3 * (cond - uncond), atol=1e-6, rtol=0)


def test_rvm_without_an_anchor_makes_no_copies_and_one_forward():
    module = make(RVM)
    module.loss(clean([1.0, -1.0]))
    assert module.forward_rows == 2 and not module.policy.roles.copies


def test_equal_rewards_teach_rvm_nothing():
    module = make(RVM)
    loss, _ = module.loss(clean([0.0, 0.0]))
    assert (gradient(loss.sum(), module.policy) == 0).all() and (loss == 0).all()


@pytest.mark.parametrize(("advantage", "sign"), [(5.0, -1), (-5.0, 1)])
def test_rvm_approaches_good_samples_and_leaves_bad_ones(advantage, sign):
    module, batch = make(RVM), clean([advantage])
    loss, metrics = module.loss(batch)
    before = metrics["error"].item()
    descend_once(loss.sum(), module.policy, 0.5)
    after = module.loss(batch)[1]["error"].item()
    assert (after - before) * sign > 1e-3


def test_times_of_rvm_are_uniform_and_new_in_each_draw():
    module = make(RVM)
    n = 4000
    batch = Rollout(["p"] * n, seeds=torch.arange(n), latents=torch.zeros(n, *SHAPE), advantages=torch.ones(n))
    levels = []
    for draw in (0, 1):
        batch.draws = torch.full((n,), draw)
        levels.append(recorded(module, batch)[2].level)
    assert levels[0].mean().item() == pytest.approx(0.5, abs=0.02)
    assert levels[0].var().item() == pytest.approx(1 / 12, abs=0.004)
    assert torch.corrcoef(torch.stack(levels))[0, 1].abs() < 0.06


def test_the_ema_anchor_follows_and_the_old_one_is_renewed():
    module = make(RVM, beta=0.1, anchor="ema", anchor_decay=0.75)
    ema, ours = module.policy.roles.copies["ema"].weight, module.policy.transformer.weight
    expected = 0.75 * ema + 0.25 * ours
    module.on_update_end()
    torch.testing.assert_close(ema, expected, atol=1e-7, rtol=0)
    module = make(RVM, beta=0.1, anchor="old")
    module.on_round_start(0)
    assert torch.equal(module.policy.roles.copies["old"].weight, module.policy.transformer.weight)


# -- DiffusionNFT ----------------------------------------------------------------------------------------------------


def test_advantages_become_optimality_probabilities():
    module = make(DiffusionNFT)
    _, metrics = module.loss(clean([-10.0, -5.0, 0.0, 2.5, 5.0, 10.0]))
    assert metrics["optimality"].tolist() == [0, 0, 0.5, 0.75, 1, 1]


@pytest.mark.parametrize("beta", [1.0, 0.1])
@pytest.mark.parametrize("adaptive", [True, False])
def test_nft_regresses_two_mirrored_velocities(beta, adaptive):
    module, batch = make(DiffusionNFT, beta=beta, adaptive=adaptive, kl=0.3), clean([2.0, -4.0, 0.5])
    loss, _, x = recorded(module, batch)
    v = module.velocity(x.latents, x.timestep, batch.prompts)
    old = module.frozen_velocity("old", x.latents, x.timestep, batch.prompts)
    reference = module.frozen_velocity("reference", x.latents, x.timestep, batch.prompts)
    r, t, expected = torch.tensor([0.7, 0.1, 0.55]), x.level.view(-1, 1, 1, 1), 0.0
    for share, branch in ((r, (1 - beta) * old + beta * v), (1 - r, (1 + beta) * old - beta * v)):
        error = rows((branch - x.target) ** 2)
        if adaptive:
            x_0 = x.latents - t * branch
            off = (x_0 - batch.latents).double()
            error = rows(off**2 / rows(off.abs()).detach().view(-1, 1, 1, 1)).float()
        expected = expected + 5 / beta * share * error
    expected = expected + 0.3 * rows((v - reference) ** 2)
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    a, b = (gradient(y.sum(), module.policy) for y in (loss, expected))
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("beta", [1.0, 0.1])
def test_plain_nft_is_velocity_matching_anchored_at_the_old_policy(beta):
    module, batch = make(DiffusionNFT, beta=beta, adaptive=False), clean([2.0, -4.0, 0.5])
    r, gaps = 2 * torch.tensor([0.7, 0.1, 0.55]) - 1, []
    for seed in (1, 2):
        module.policy.move(seed)
        loss, _, x = recorded(module, batch)
        v = module.velocity(x.latents, x.timestep, batch.prompts)
        old = module.frozen_velocity("old", x.latents, x.timestep, batch.prompts)
        gaps.append((loss / 10 - literal(v, x.target, r, beta - r, old)).detach())  # 1/(2 beta) of the two branches
        ours = velocity_matching(v, x.target, r, (beta - r, old))
        a, b = gradient(loss.sum() / 10, module.policy), gradient(ours.sum(), module.policy)
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(gaps[0], gaps[1], atol=2e-5, rtol=1e-4)  # whatever the weights in training
    constant = 0.5 * (1 / beta - r) * rows((old - x.target) ** 2)
    torch.testing.assert_close(gaps[0], constant, atol=2e-5, rtol=1e-4)


def at_old(**options):
    module = make(DiffusionNFT, **options)
    module.policy.roles.follow("old", 0.0)
    return module


def test_indifference_leaves_the_old_policy_alone_and_pulls_back_to_it():
    module, batch = at_old(adaptive=False), clean([0.0, 0.0])
    loss, _ = module.loss(batch)
    assert gradient(loss.sum(), module.policy).abs().max() < 1e-5
    module.policy.move(3)
    loss, metrics = module.loss(batch)
    descend_once(loss.sum(), module.policy, 1e-3)
    assert (module.loss(batch)[1]["moved"] < metrics["moved"]).all()


def test_at_the_old_policy_the_value_does_not_know_the_reward_but_the_gradient_does():
    module = at_old()
    good, bad = (module.loss(clean([a, a]))[0] for a in (4.0, -4.0))
    torch.testing.assert_close(good, bad, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        gradient(good.sum(), module.policy), -gradient(bad.sum(), module.policy), atol=1e-4, rtol=1e-3
    )
    assert gradient(good.sum(), module.policy).abs().max() > 0.1


def test_the_error_in_data_space_is_that_of_velocity_times_the_squared_level():
    module = make(DiffusionNFT)
    x_0, noise, v = normal(3, 4), normal(3, 4, seed=1), normal(3, 4, seed=2).requires_grad_()
    t = torch.tensor([0.1, 0.5, 1.0]).double()
    x = Noised((1 - t[:, None]) * x_0 + t[:, None] * noise, noise - x_0, t, 1000 * t)
    in_data = rows((x.latents - t[:, None] * v - x_0) ** 2)
    torch.testing.assert_close(in_data, t**2 * rows((v - x.target) ** 2), atol=1e-13, rtol=0)
    error = module.error(v, x)
    torch.testing.assert_close(error, in_data / rows((t[:, None] * (v - x.target)).abs()), atol=1e-13, rtol=0)
    difference = (v - x.target).detach()
    expected = 2 * t[:, None] * difference / rows(difference.abs())[:, None] / 4
    torch.testing.assert_close(torch.autograd.grad(error.sum(), v)[0], expected, atol=1e-13, rtol=0)


def test_a_perfect_velocity_has_no_error_and_no_nan():
    module, x_0 = make(DiffusionNFT), normal(2, 4)
    v = normal(2, 4, seed=1).requires_grad_()
    error = module.error(v, Noised(x_0, v.detach(), torch.ones(2).double(), torch.ones(2)))
    assert (error == 0).all() and (torch.autograd.grad(error.sum(), v)[0] == 0).all()


@pytest.mark.parametrize(
    ("schedule", "values"),
    [
        ("copy", {0: 0, 1000: 0}),
        ("ramp", {0: 0, 10: 0.01, 500: 0.5, 5000: 0.5}),
        ("late_ramp", {0: 0, 74: 0, 75: 0, 76: 0.0075, 208: 0.9975, 209: 0.999, 5000: 0.999}),
        (0.3, {0: 0.3, 1000: 0.3}),
    ],
)
def test_the_published_lags(schedule, values):
    assert {update: lag(schedule, update) for update in values} == pytest.approx(values)


def test_the_old_policy_follows_after_the_first_round_and_the_reference_stays():
    module = make(DiffusionNFT, lag=0.75, kl=0.1)
    copies, ours = module.policy.roles.copies, module.policy.transformer.weight
    old, reference = copies["old"].weight.clone(), copies["reference"].weight.clone()
    module.on_round_start(0)
    assert torch.equal(copies["old"].weight, old)
    module.on_round_start(1)
    torch.testing.assert_close(copies["old"].weight, 0.75 * old + 0.25 * ours, atol=1e-7, rtol=0)
    assert torch.equal(copies["reference"].weight, reference)


def test_draws_of_a_sample_visit_every_level_of_the_grid_but_the_last_once():
    module = make(DiffusionNFT)
    assert module.rows_per_sample == 3
    batch = clean([1.0] * 12, draws=[i % 3 for i in range(12)])
    batch.seeds = torch.arange(4).repeat_interleave(3)
    levels = module.levels(batch).view(4, 3)
    assert torch.equal(levels.sort(descending=True).values, torch.tensor(SIGMAS[:3]).expand(4, 3))
    assert len({tuple(row) for row in levels.tolist()}) > 1  # orders of their own


def test_samples_without_a_valid_reward_are_left_out_of_the_loss_but_counted_in_its_mean():
    module, batch = make(DiffusionNFT), clean([2.0, 0.0, -1.0])
    batch.valid = torch.tensor([True, False, True])
    geometry = SimpleNamespace(micro_batches=4, rows_per_update=10)
    module._trainer = SimpleNamespace(datamodule=SimpleNamespace(geometry=geometry), global_step=0)
    expected = module.loss(batch)[0][[0, 2]].sum() * 4 / 10
    torch.testing.assert_close(module.training_step(batch, 0), expected)


# -- Flow-GRPO -------------------------------------------------------------------------------------------------------


class Replayed(FlowGRPO):
    """Not in the first update of a round, without a trainer that would say so."""

    update_in_round = 1


def transitions(module, advantages: list[float], log_ratios: list[float] | None = None) -> tuple[Rollout, Tensor]:
    """One row at each of the first steps, drawn by the role ``old`` (made here), and the noise of the draw.

    With ``log_ratios`` the old log-probabilities are such that these are the ratios now.
    """
    policy, n = module.policy, len(advantages)
    policy.roles.add("old")
    policy.move(5, 0.05)
    sigmas = module.schedule().sigmas
    x, noise = randn(SHAPE, list(range(n)), 1), randn(SHAPE, list(range(n)), 2)
    batch = Rollout([f"p{'x' * i}" for i in range(n)], advantages=torch.tensor(advantages))
    old = module.frozen_velocity("old", x, 1000 * sigmas[:n], batch.prompts)
    step = module.kernel.transition(sigmas[:n], sigmas[1 : n + 1], sigmas, 4)
    mean = step.mean(x, old)
    x_next = mean + step.std * noise
    log_prob = step.log_prob(x_next, mean)
    if log_ratios is not None:
        with torch.no_grad():
            now = step.mean(x, module.velocity(x, 1000 * sigmas[:n], batch.prompts))
        log_prob = step.log_prob(x_next, now) - torch.tensor(log_ratios)
    batch.transitions = {
        "latents": x,
        "next_latents": x_next,
        "log_prob": log_prob,
        "sigma": sigmas[:n],
        "sigma_next": sigmas[1 : n + 1],
        "timestep": 1000 * sigmas[:n],
        "velocity": old,
    }
    return batch, noise


def flow(sigmas: list[float], k: int, eta: float) -> tuple[float, float, float]:
    """Coefficients of the k-th step of Flow-GRPO: of x, of v, and the deviation."""
    s, s_next = sigmas[k], sigmas[k + 1]
    g2 = eta**2 * s / (1 - (sigmas[1] if s == 1 else s))
    return 1 + g2 / (2 * s) * (s_next - s), (1 + g2 * (1 - s) / (2 * s)) * (s_next - s), (g2 * (s - s_next)) ** 0.5


def test_flow_grpo_has_the_clipped_loss_of_its_paper():
    module = make(Replayed, clip=1e-3, kl=0.5)
    batch, _ = transitions(module, [1.5, -2.0, 0.7])
    loss, metrics = module.loss(batch)
    kept, expected, ratios, divergences = batch.transitions, [], [], []
    v = module.velocity(kept["latents"], kept["timestep"], batch.prompts).double()
    reference = module.frozen_velocity("reference", kept["latents"], kept["timestep"], batch.prompts).double()
    for k, advantage in enumerate([1.5, -2.0, 0.7]):
        a, b, std = flow(SIGMAS, k, 0.7)
        x, x_next = kept["latents"][k].double(), kept["next_latents"][k].double()
        old = kept["velocity"][k].double()
        squares = [((x_next - a * x - b * y) ** 2).mean() / (2 * std**2) for y in (v[k], old)]
        ratio = (squares[1] - squares[0]).exp()
        divergence = ((b * (v[k] - reference[k])) ** 2).mean() / (2 * std**2)
        surrogate = min(ratio * advantage, ratio.clamp(1 - 1e-3, 1 + 1e-3) * advantage, key=lambda y: y.item())
        expected.append(-surrogate + 0.5 * divergence)
        ratios.append(ratio.item())
        divergences.append(divergence.item())
    expected = torch.stack(expected)
    assert all(abs(r - 1) > 1e-4 for r in ratios)
    torch.testing.assert_close(loss.double(), expected, atol=5e-6, rtol=1e-5)
    assert metrics["kl"].tolist() == pytest.approx(divergences, rel=1e-4)
    assert metrics["ratio_deviation"].tolist() == pytest.approx([abs(r - 1) for r in ratios], rel=1e-2, abs=2e-6)
    a, b = (gradient(y.sum(), module.policy) for y in (loss, expected))
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("advantage", "log_ratio", "value", "learns"),
    [
        (2.0, 0.05, -2 * 1.01, False),  # better already: no more
        (2.0, -0.05, -2 * 0.951229, True),
        (-2.0, -0.05, 2 * 0.99, False),  # worse already: no more
        (-2.0, 0.05, 2 * 1.051271, True),
        (2.0, 0.005, -2 * 1.005013, True),
        (-2.0, -0.005, 2 * 0.995012, True),
    ],
)
def test_only_ratios_on_the_far_side_are_clipped(advantage, log_ratio, value, learns):
    module = make(Replayed, clip=1e-2)
    batch, _ = transitions(module, [advantage], [log_ratio])
    loss, metrics = module.loss(batch)
    assert loss.item() == pytest.approx(value, abs=1e-4)
    assert (gradient(loss.sum(), module.policy).abs().max() > 1e-4) == learns
    assert metrics["clip_fraction"].item() == float(abs(log_ratio) > 0.01)


def test_an_advantage_of_zero_teaches_flow_grpo_nothing():
    module = make(Replayed)
    loss, _ = module.loss(transitions(module, [0.0, 0.0])[0])
    assert (gradient(loss.sum(), module.policy) == 0).all()


def test_the_guarded_log_ratio_is_the_mean_of_noise_times_shift():
    module = make(Replayed, guard=True)
    batch, noise = transitions(module, [1.0, 1.0, 1.0])
    kept, step = batch.transitions, module.transition(batch.transitions)
    v = module.velocity(kept["latents"], kept["timestep"], batch.prompts)
    log_ratio = step.log_prob(kept["next_latents"], step.mean(kept["latents"], v)) - kept["log_prob"]
    guarded = module.guarded(log_ratio, step, v, kept["velocity"])
    shift = step.mean(kept["latents"], v) - step.mean(kept["latents"], kept["velocity"])
    assert rows(shift.abs()).min() > 1e-4
    torch.testing.assert_close(guarded, rows(noise * shift), atol=2e-6, rtol=1e-4)


def test_the_guard_divides_the_loss_by_the_length_of_the_step():
    module = make(Replayed, guard=True, clip=1.0)
    batch, noise = transitions(module, [1.0, 1.0, 1.0])
    kept, step = batch.transitions, module.transition(batch.transitions)
    v = module.velocity(kept["latents"], kept["timestep"], batch.prompts)
    shift = step.mean(kept["latents"], v) - step.mean(kept["latents"], kept["velocity"])
    expected = -rows(noise * shift).exp() / torch.tensor([0.1, 0.2, 0.3])
    torch.testing.assert_close(module.loss(batch)[0], expected, atol=1e-5, rtol=1e-5)


def sensitivity(module, n: int) -> Tensor:
    """Of each row's loss to the velocity, in units of the drawn noise, before anything has moved."""
    batch, noise = transitions(module, [1.0] * n)
    module.policy.roles.follow("old", 0.0)
    kept, step = batch.transitions, module.transition(batch.transitions)
    v = module.velocity(kept["latents"], kept["timestep"], batch.prompts).detach().requires_grad_()
    mean = step.mean(kept["latents"], v)
    kept["velocity"], kept["next_latents"] = v.detach(), (mean + step.std * noise).detach()
    kept["log_prob"] = step.log_prob(kept["next_latents"], mean).detach()
    module.velocity = lambda *args, **options: v
    loss, _ = module.loss(batch)
    slope = torch.autograd.grad(loss.sum(), v)[0] / noise * noise[0].numel()
    assert (slope - slope.mean((1, 2, 3), keepdim=True)).abs().max() < 1e-3 * slope.abs().max()
    return slope.abs().mean((1, 2, 3))


def test_steps_are_as_strong_as_their_gain_unless_weighted():
    raw = sensitivity(make(Replayed), 3)
    expected = [abs(b) / std for _, b, std in (flow(SIGMAS, k, 0.7) for k in range(3))]
    assert raw.tolist() == pytest.approx(expected, rel=1e-3)
    assert raw.max() / raw.min() > 2


def test_weighted_by_the_inverse_gain_all_steps_are_equally_strong_and_the_mean_weight_is_one():
    weighted = sensitivity(make(Replayed, step_weight="inverse_gain"), 3)
    gains = [abs(b) / std for _, b, std in (flow(SIGMAS, k, 0.7) for k in range(3))]
    mean = sum(1 / g for g in gains) / 3
    assert weighted.tolist() == pytest.approx([1 / mean] * 3, rel=1e-3)


def test_guarded_steps_are_equally_strong_but_for_the_bounded_first_one():
    strengths = sensitivity(make(Replayed, guard=True, clip=1.0), 3)
    assert strengths[1:].tolist() == pytest.approx([1 + 0.7**2 / 2] * 2, rel=1e-3)  # 1 + eta^2 / 2


def test_the_mean_weight_is_taken_over_the_range_of_the_window():
    module = make(Replayed, step_weight="inverse_gain", window=1, window_range=(1, 3))
    gains = [abs(b) / std for _, b, std in (flow(SIGMAS, k, 0.7) for k in (1, 2))]
    assert module.mean_inverse_gain() == pytest.approx(sum(1 / g for g in gains) / 2, rel=1e-5)


@pytest.mark.parametrize(
    ("algorithm", "options", "message"),
    [
        (FlowGRPO, {"eta": 0.0}, "model.eta is 0.0"),
        (FlowGRPO, {"clip": 0.0}, "clip must be above 0"),
        (FlowGRPO, {"kl": -1.0}, "kl at least 0"),
        (FlowGRPO, {"solver": "dpm2"}, "stochastic steps need 'euler'"),
        (FlowGRPO, {"window": 4}, "model.window is 4; it must lie between 1 and the 3 steps"),
        (FlowGRPO, {"window_range": (0, 4)}, r"model.window_range is \[0, 4\]; it must lie within \[0, 3\]"),
        (FlowGRPO, {"kernel": "ddim"}, "kernel is 'ddim'"),
        (FlowGRPO, {"sigmas": [1.0, 0.0]}, "model.num_steps is 1"),
        (RVM, {"beta": -0.1}, "model.beta is -0.1"),
        (RVM, {"shaping": 0.0}, "shaping above 0"),
        (RVM, {"anchor_decay": 1.0}, "model.anchor_decay is 1.0"),
        (RVM, {"draws_per_sample": 0}, "model.draws_per_sample is 0"),
        (RVM, {"advantage_clip": 0.0}, "model.advantage_clip is 0.0"),
        (DiffusionNFT, {"beta": 0.0}, "beta must be above 0"),
        (DiffusionNFT, {"lag": 1.0}, "model.lag is 1.0"),
        (DiffusionNFT, {"draws_per_sample": 4}, "at most 3, the levels of model.num_steps 4"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(algorithm, options, message):
    with pytest.raises(ValueError, match=message):
        make(algorithm, **options)
