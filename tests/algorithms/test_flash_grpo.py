"""Flash-GRPO: one step a sample, shared by the samples of a prompt, and gradients of one strength at all of them."""

from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from torch import Tensor

from lit_diffrl.algorithms import FlashGRPO, FlowGRPO
from lit_diffrl.callbacks import FunctionReward
from lit_diffrl.rollouts import Rollout
from lit_diffrl.rollouts.advantages import RewardSpec, advantages
from lit_diffrl.rollouts.geometry import Geometry, sample_seed, split_into_updates
from lit_diffrl.sampling import Kernel
from lit_diffrl.sampling.noise import INITIAL, STEP, randn
from tests import helpers
from tests.algorithms.test_losses import gradient, make, normal, rows
from tests.algorithms.toy import SHAPE, ToyPolicy

SEED = 7
WAN = [7.4770, 7.0414, 6.6112, 6.1867, 5.7682, 5.3559, 4.9502, 4.5513, 4.1596, 3.7754]


def shifted(levels: Tensor, shift: float) -> Tensor:
    return shift * levels / (1 + (shift - 1) * levels)


def wan(n: int, shift: float = 3.0) -> Tensor:
    """The grid for which the constants of the released code were printed: that of an older diffusers."""
    levels = 1 - torch.linspace(1, 1e-3, n + 1, dtype=torch.float64)
    return torch.cat([shifted(levels, shift).flip(0)[:-1], levels.new_zeros(1)])


def even(n: int, shift: float = 3.0) -> Tensor:
    return shifted(torch.linspace(1, 0, n + 1, dtype=torch.float64), shift)


TEN = even(10).tolist()


def attach(module, rank=0, round_=0, update=0, **numbers):
    """Stand in for a run: its numbers, and how far it is."""
    sizes = {"prompts_per_round": 5, "group_size": 4, "rollout_batch_size": 20, "batch_size": 20} | numbers
    geometry = Geometry(**({"updates_per_round": 1} | sizes), rows_per_sample=module.rows_per_sample)
    geometry.check()
    module._trainer = SimpleNamespace(
        datamodule=SimpleNamespace(seed=SEED, geometry=geometry),
        train_dataloader=SimpleNamespace(round=round_, position=1 + update * geometry.micro_batches),
        precision_plugin=SimpleNamespace(forward_context=nullcontext),
        global_rank=rank,
    )
    return module


def blank(module, round_: int = 0) -> Rollout:
    """The samples of a rank before they are drawn."""
    geometry, rank = module.data.geometry, module.trainer.global_rank
    ids = torch.arange(geometry.samples_per_rank) + rank * geometry.samples_per_rank
    groups = ids // geometry.group_size
    seeds = torch.tensor([sample_seed(SEED, round_, i) for i in ids.tolist()])
    return Rollout([f"p{'x' * g}" for g in groups.tolist()], sample_ids=ids, group_ids=groups, seeds=seeds)


def draw(module, round_: int = 0, batch: int | None = None) -> Rollout:
    """A round as the loader has it drawn, ``batch`` samples at a time."""
    whole = blank(module, round_)
    batch = batch or len(whole)
    return Rollout.cat([module.collect(whole[i : i + batch], round_) for i in range(0, len(whole), batch)])


def learn(rollout: Rollout, advantages: Tensor | float, picked: Tensor | None = None) -> Rollout:
    """All rows of a drawn round, or those of some samples, as one micro-batch."""
    picked = torch.arange(len(rollout)) if picked is None else picked
    kept = rollout.transitions["sigma"].shape[1]
    batch = rollout.rows(picked.repeat_interleave(kept), torch.arange(kept).repeat(len(picked)))
    batch.advantages = torch.as_tensor(advantages).float().expand(len(batch))
    return batch


def euler(module, x: Tensor, prompts: list[str], first: int, last: int) -> Tensor:
    """The deterministic steps ``[first, last)``."""
    sigmas = module.schedule().sigmas
    for k in range(first, last):
        with torch.no_grad():
            v = module.velocity(x, (1000 * sigmas[k]).expand(len(x)), prompts)
        x = x + (sigmas[k + 1] - sigmas[k]) * v
    return x


def kept_steps(module, rollout: Rollout) -> Tensor:
    """(B, K) which steps were kept, read off the noise levels."""
    return (rollout.transitions["sigma"][..., None] == module.schedule().sigmas).int().argmax(-1)


# -- the weight of a step --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "shift", "table", "bounds"),
    [
        (20, 3.0, WAN, {"rel": 1e-5, "abs": 0}),
        (12, 3.0, [5.654, 5.105, 4.568, 4.044, 3.534, 3.039], {"abs": 5.1e-4}),  # printed to three digits
        (12, 5.0, [7.344, 6.658, 5.980, 5.309, 4.647, 3.996], {"abs": 5.1e-4}),
    ],
)
def test_the_inverse_gains_of_wan_are_the_constants_of_the_released_code(n, shift, table, bounds):
    grid = wan(n, shift)
    inverse = (1 / Kernel("linear", 1.0).transition(grid[:-1], grid[1:], grid).gain)[: n // 2].tolist()
    assert inverse == pytest.approx(table, **bounds)


def published(**options) -> FlashGRPO:
    """Ten groups, of which each draws one of the ten steps of the published table."""
    module = make(FlashGRPO, sigmas=wan(20).tolist(), kernel="linear", eta=1.0, **options)
    return attach(module, prompts_per_round=10, group_size=2, rollout_batch_size=20, batch_size=20)


def test_an_update_over_all_steps_has_the_published_weights_with_mean_one():
    module = published()
    rollout = draw(module)
    batch = learn(rollout, 1.0)
    weight = module.weight(module.transition(batch.transitions), batch.transitions)
    steps = kept_steps(module, rollout).flatten()
    assert sorted(steps.tolist()) == sorted([*range(10)] * 2)
    assert weight.tolist() == pytest.approx([WAN[k] / (sum(WAN) / 10) for k in steps.tolist()], rel=2e-5)
    assert weight.double().mean().item() == pytest.approx(1, abs=1e-6)


def test_an_advantage_at_the_first_step_weighs_as_much_more_than_one_at_the_tenth_as_published():
    module = published(clip=1e-3)
    rollout = draw(module)
    steps, losses = kept_steps(module, rollout).flatten(), []
    for k in (0, 9):
        one_hot = (steps == k).float() * torch.tensor([1.0, 0.0]).repeat(10)  # one of the two samples of its group
        losses.append(module.loss(learn(rollout, one_hot))[0].mean().item())
    assert losses[0] / losses[1] == pytest.approx(7.4770 / 3.7754, rel=2e-5)
    assert losses[1] == pytest.approx(-3.7754 / (sum(WAN) / 10) / 20, rel=2e-5)


def rows_at_all_steps(module, noise: Tensor, advantage: Tensor) -> tuple[Tensor, Rollout]:
    """A row at each step of the range, just drawn, and the velocity that drew it, in float64."""
    lo, hi = module.window_range
    sigmas, n = module.schedule().sigmas.double(), hi - lo
    x, v = normal(n, *SHAPE), normal(n, *SHAPE, seed=1)
    step = module.kernel.transition(sigmas[lo:hi], sigmas[lo + 1 : hi + 1], sigmas, x.ndim)
    mean = step.mean(x, v)
    batch = Rollout(["p"] * n, advantages=advantage)
    batch.transitions = {
        "latents": x,
        "next_latents": mean + step.std * noise,
        "log_prob": step.log_prob(mean + step.std * noise, mean),
        "sigma": sigmas[lo:hi],
        "sigma_next": sigmas[lo + 1 : hi + 1],
        "velocity": v,
    }
    return v.clone().requires_grad_(), batch


def slopes(module) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of each row's loss with respect to its velocity, the noise of its step, and its advantage."""
    attach(module)
    n = module.window_range[1] - module.window_range[0]
    noise, advantage = normal(n, *SHAPE, seed=2), normal(n, seed=3)
    velocity, batch = rows_at_all_steps(module, noise, advantage)
    loss, _ = module.objective(velocity, batch)
    return torch.autograd.grad(loss.sum(), velocity)[0], noise, advantage


@pytest.mark.parametrize(
    ("kernel", "eta"), [("flow", 0.7), ("dance", 0.3), ("linear", 1.0), ("cps", 0.8)], ids=lambda x: str(x)
)
def test_the_gradient_is_the_noise_of_the_step_times_the_advantage_whatever_the_step_and_kernel(kernel, eta):
    module = make(FlashGRPO, sigmas=TEN, kernel=kernel, eta=eta, window_range=(0, 9))
    g, noise, advantage = slopes(module)
    # The loss is -A w r, whose slope is -A w (-lambda noise / D), and w is 1/lambda over its mean.
    expected = advantage.view(-1, 1, 1, 1) * noise / noise[0].numel() / module.mean_inverse_gain()
    torch.testing.assert_close(g, expected, rtol=1e-5, atol=0)


def test_rectified_steps_are_equally_strong_where_raw_ones_differ_twofold():
    spread = {}
    for step_weight in ("inverse_gain", "uniform"):
        # From the second level of an even grid on, as the stored check of the specification has it.
        options = {"kernel": "linear", "eta": 1.0, "window_range": (1, 11), "step_weight": step_weight}
        g, noise, advantage = slopes(make(FlashGRPO, sigmas=even(20).tolist(), **options))
        strength = g.flatten(1).norm(dim=1) / noise.flatten(1).norm(dim=1) / advantage.abs()
        spread[step_weight] = (strength.max() / strength.min()).item()
    assert spread["inverse_gain"] == pytest.approx(1, abs=1e-5)
    assert spread["uniform"] == pytest.approx(2.1, abs=0.05)


def test_weights_leave_the_clipping_as_it_is():
    log_ratios = torch.tensor([0.05, -0.05, 0.05, -0.05, 0.005]).double()
    outcomes = {}
    for step_weight in ("uniform", "inverse_gain"):
        module = attach(make(FlashGRPO, sigmas=TEN, clip=1e-2, step_weight=step_weight))
        velocity, batch = rows_at_all_steps(
            module, normal(5, *SHAPE, seed=2), torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0])
        )
        batch.transitions["log_prob"] = batch.transitions["log_prob"] - log_ratios
        loss, metrics = module.objective(velocity, batch)
        g = torch.autograd.grad(loss.sum(), velocity)[0]
        weight = module.weight(module.transition(batch.transitions), batch.transitions)
        outcomes[step_weight] = metrics["clip_fraction"].tolist(), rows(g.abs()) > 0, loss.detach() / weight
    ours, plain = outcomes["inverse_gain"], outcomes["uniform"]
    assert ours[0] == plain[0] == [1, 1, 1, 1, 0]
    # Better already with a good sample, worse already with a bad one: nothing to learn.
    assert ours[1].tolist() == plain[1].tolist() == [False, True, True, False, True]
    torch.testing.assert_close(ours[2], plain[2])
    assert plain[2].tolist() == pytest.approx([-1.01, -0.951229, 1.051271, 0.99, -1.005013], abs=1e-6)


@pytest.mark.parametrize("updates", [1, 2])
def test_the_mean_of_the_weights_does_not_know_how_many_ranks_share_the_update(updates):
    """Four groups of three: an update of half of the round has one or two samples of a group."""
    sizes, means = {"prompts_per_round": 4, "group_size": 3, "updates_per_round": updates}, {}
    for round_ in range(3):
        for update in range(updates):
            for ranks in (1, 2, 3):  # on three ranks the second group is on two of them
                for rank in range(ranks):
                    module = make(FlashGRPO, sigmas=TEN)
                    attach(module, rank, round_, update, **sizes, world_size=ranks)
                    means.setdefault((round_, update), []).append(module.mean_inverse_gain())
            learnt = split_into_updates(SEED, round_, attach(module, **sizes).data.geometry, 0)[update]
            steps, inverse = module.steps(round_), inverse_gains(module)
            by_hand = sum(inverse[steps[i // 3]] for i in learnt) / len(learnt)
            assert means[round_, update] == pytest.approx([by_hand] * 6, rel=1e-6)
    distinct = {round(values[0], 6) for values in means.values()}
    assert len(distinct) > 2 * (updates - 1)  # updates of one round have means of their own


def inverse_gains(module) -> list[float]:
    """1/lambda of each step of Flow-GRPO but the last, from its closed form."""
    s = module.schedule().sigmas.double()
    bounded = s.minimum(s[1])  # the noise of the first step, where s / (1 - s) diverges
    g = module.kernel.eta * (s / (1 - bounded)).sqrt()
    gain = (s[:-1] - s[1:]).sqrt() * (1 / g + g * (1 - s) / (2 * s))[:-1]
    return (1 / gain)[:-1].tolist()


# -- which step ------------------------------------------------------------------------------------------------------


def drawing(**options):
    numbers = {k: options.pop(k) for k in ("prompts_per_round", "group_size", "world_size", "rank") if k in options}
    sizes = {"rollout_batch_size": 1, "batch_size": 1} | numbers
    return attach(make(FlashGRPO, sigmas=even(options.pop("num_steps", 10)).tolist(), **options), **sizes)


def test_samples_of_a_prompt_share_their_step_on_all_ranks():
    for round_ in range(4):
        steps = []
        for rank in range(2):
            module = drawing(prompts_per_round=5, group_size=4, world_size=2, rank=rank)
            plan = module.plan(blank(module, round_), round_)
            assert plan.kept.shape == (10, 1)
            steps += plan.kept.flatten().tolist()
        groups = [steps[4 * g : 4 * g + 4] for g in range(5)]  # the third one is on both ranks
        assert all(len(set(group)) == 1 for group in groups)
        assert sorted(group[0] for group in groups) == [0, 1, 2, 3, 4]  # and all groups have steps of their own
        whole = drawing(prompts_per_round=5, group_size=4)
        assert whole.plan(blank(whole, round_), round_).kept.flatten().tolist() == steps


def test_only_the_kept_step_is_stochastic():
    module = drawing()
    plan = module.plan(blank(module), 0)
    assert torch.equal(plan.stochastic.int().argmax(1, keepdim=True), plan.kept)
    assert plan.stochastic.sum(1).tolist() == [1] * 20


@pytest.mark.parametrize("groups", [5, 8, 12, 3])
def test_stratified_steps_are_spread_as_evenly_as_they_go(groups):
    module = drawing(prompts_per_round=groups)
    total = Counter()
    for round_ in range(300):
        steps = module.steps(round_)
        counts = [steps.count(k) for k in range(5)]
        assert sum(counts) == groups and max(counts) - min(counts) == (groups % 5 > 0)
        total.update(steps)
    # The steps that get one more differ from round to round, so that in the long run all are equally frequent.
    expected = 300 * groups / 5
    assert all(abs(total[k] - expected) < 45 for k in range(5))


def test_the_step_of_a_group_differs_from_round_to_round():
    for step_draw in ("stratified", "independent"):
        module = drawing(prompts_per_round=6, step_draw=step_draw)
        first = Counter(module.steps(round_)[0] for round_ in range(500))
        assert set(first) == set(range(5)) and all(abs(n - 100) < 45 for n in first.values()), step_draw


def test_stratified_groups_take_their_steps_in_a_new_order_every_round():
    """Or the steps of two neighbouring groups would always be as far apart."""
    module = drawing(prompts_per_round=5)
    pairs = Counter(tuple(module.steps(round_)[:2]) for round_ in range(600))
    assert len(pairs) == 20 and all(a != b for a, b in pairs)
    assert min(pairs.values()) > 10


def test_independent_steps_are_plain_draws():
    module = drawing(prompts_per_round=6, step_draw="independent")
    rounds = [module.steps(round_) for round_ in range(400)]
    assert all(0 <= k < 5 for steps in rounds for k in steps)
    counts = torch.tensor([[steps.count(k) for k in range(5)] for steps in rounds])
    assert (counts.amax(1) - counts.amin(1) > 1).float().mean() > 0.5
    # Those of a multinomial law: a step is drawn by 6 / 5 groups in the mean, with variance 6 * 1/5 * 4/5.
    assert counts.double().var().item() == pytest.approx(0.96, abs=0.1)
    pairs = sum(steps[0] == steps[1] for steps in rounds) / 400
    assert pairs == pytest.approx(1 / 5, abs=0.07)


@pytest.mark.parametrize(("num_steps", "steps"), [(20, 10), (12, 6), (10, 5), (3, 1), (2, 1)])
def test_steps_come_from_the_noisy_half_unless_told_otherwise(num_steps, steps):
    module = drawing(num_steps=num_steps, prompts_per_round=24)
    assert set(module.steps(0)) == set(range(steps))


@pytest.mark.parametrize("step_draw", ["stratified", "independent"])
def test_steps_come_from_the_given_range(step_draw):
    module = drawing(prompts_per_round=60, window_range=(2, 6), step_draw=step_draw)
    assert set(module.steps(0)) == {2, 3, 4, 5}


# -- the rollout -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [20, 3])
def test_a_rollout_is_the_deterministic_one_but_for_the_noise_of_the_kept_step(batch):
    module = attach(make(FlashGRPO, sigmas=TEN))
    rollout = draw(module, 1, batch)
    kept, sigmas = rollout.transitions, module.schedule().sigmas
    assert all(x.shape[:2] == (20, 1) for x in kept.values())
    initial = randn(SHAPE, rollout.seeds.tolist(), INITIAL)
    assert (torch.cdist(initial.flatten(1), initial.flatten(1)) + 9 * torch.eye(20)).min() > 0.1
    steps = module.steps(1)
    for i in range(20):
        k, one, prompt = steps[i // 4], slice(i, i + 1), rollout.prompts[i : i + 1]
        before = euler(module, initial[one], prompt, 0, k)
        torch.testing.assert_close(kept["latents"][one, 0], before, atol=1e-5, rtol=0)
        assert kept["sigma"][i, 0] == sigmas[k] and kept["sigma_next"][i, 0] == sigmas[k + 1]
        step = module.kernel.transition(sigmas[k], sigmas[k + 1], sigmas)
        velocity = module.velocity(before, kept["timestep"][one, 0], prompt)
        noise = (kept["next_latents"][one, 0] - step.mean(before, velocity)) / step.std
        torch.testing.assert_close(noise, randn(SHAPE, [int(rollout.seeds[i])], STEP, k), atol=1e-4, rtol=0)
        last = euler(module, kept["next_latents"][one, 0], prompt, k + 1, 10)
        torch.testing.assert_close(rollout.media[one], module.policy.decode(last, module.size), atol=1e-5, rtol=0)


def test_before_the_first_update_all_ratios_are_one_and_the_loss_of_advantage_one_is_minus_one():
    module = attach(make(FlashGRPO, sigmas=TEN))
    loss, metrics = module.loss(learn(draw(module), 1.0))
    assert metrics["first_ratio_deviation_max"].max() < 1e-6
    assert loss.double().mean().item() == pytest.approx(-1, abs=1e-6)
    assert loss.std() > 0.1  # rows differ in weight


def test_with_one_step_to_draw_from_and_equal_weights_it_is_flow_grpo_with_a_window_of_one():
    outcomes = []
    for algorithm, options in ((FlashGRPO, {"step_weight": "uniform"}), (FlowGRPO, {"window": 1})):
        module = attach(make(algorithm, sigmas=TEN, window_range=(3, 4), kl=0.1, **options))
        rollout = draw(module)
        module.policy.move(3, 0.01)
        batch = learn(rollout, normal(20))
        loss, _ = module.loss(batch)
        outcomes.append((rollout.media, loss, gradient(loss.sum(), module.policy)))
    for ours, theirs in zip(*outcomes):
        assert torch.equal(ours, theirs)


def test_a_shared_step_keeps_its_difficulty_out_of_the_advantages():
    """Rewards are the quality of a sample plus what its step makes of it, as in the note on variance."""
    groups, size = 4000, 8
    module = drawing(num_steps=20, prompts_per_round=groups, group_size=size, step_draw="independent")
    generator = torch.Generator().manual_seed(0)
    quality = 0.2 * torch.randn(groups, size, dtype=torch.float64, generator=generator)
    difficulty = torch.linspace(-1, 1, 10, dtype=torch.float64)
    shared = torch.tensor(module.steps(0))[:, None].expand(-1, size)
    own = torch.randint(0, 10, (groups, size), generator=generator)
    ids = torch.arange(groups).repeat_interleave(size)
    corr = {}
    for name, steps in (("shared", shared), ("own", own)):
        rewards = (quality + difficulty[steps]).reshape(-1, 1)
        options = {"std": module.advantage_options["std"]}
        a = advantages(rewards, torch.ones(len(rewards), 1).bool(), [RewardSpec()], ids, **options).advantages
        centred = (quality - quality.mean(1, keepdim=True)).flatten()
        corr[name] = torch.corrcoef(torch.stack([a, centred]))[0, 1].item()
    assert corr["shared"] > 0.9999
    assert corr["own"] == pytest.approx(0.29, abs=0.02)


def test_advantages_are_scaled_by_the_deviation_of_the_whole_round():
    assert make(FlashGRPO).advantage_options["std"] == "global"


# -- runs ------------------------------------------------------------------------------------------------------------


class Watched(FlashGRPO):
    """Notes each micro-batch: its update, its samples, their weights and their losses."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = []

    def loss(self, batch):
        loss, metrics = super().loss(batch)
        weight = self.weight(self.transition(batch.transitions), batch.transitions)
        update = self.loader.round, self.update_in_round
        self.seen.append((update, batch.sample_ids.tolist(), weight.tolist(), loss.detach()))
        return loss, metrics


class Ones(L.Callback):
    """Gives every sample the advantage 1."""

    def on_rollout_end(self, trainer, module, rollout):
        rollout.advantages[:] = 1


def brightness() -> FunctionReward:
    reward = FunctionReward(lambda rollout: rollout.media.mean((1, 2, 3)))
    reward.name = "brightness"
    return reward


def fit(module, prompts, *callbacks, lr=0.0, trainer=None, **numbers):
    """Train with the brightness of the samples as the reward."""
    module.optimizer = lambda p: torch.optim.SGD(p, lr=lr)
    run = helpers.trainer(**({"max_epochs": 2} | (trainer or {})))
    run.callbacks = [c for c in run.callbacks if not getattr(c, "is_reward", False)] + [brightness(), *callbacks]
    numbers = {"prompts_per_round": 3, "group_size": 4, "rollout_batch_size": 12, "batch_size": 12} | numbers
    run.fit(module, datamodule=helpers.data(prompts, **numbers))
    return run


def toy(algorithm=Watched, **options):
    return algorithm(ToyPolicy(TEN), num_steps=10, **options)


def by_update(seen) -> dict[tuple[int, int], dict[int, float]]:
    """Update -> sample -> weight."""
    found: dict = {}
    for update, samples, weights, _ in seen:
        assert not set(samples) & set(found.setdefault(update, {}))
        found[update] |= dict(zip(samples, weights))
    return found


@pytest.mark.parametrize("updates", [1, 2])
def test_the_weights_of_a_sample_are_those_of_any_micro_batch_and_have_mean_one_over_the_update(prompt_file, updates):
    found, losses = [], []
    for batch_size in (12, 5, 1):  # with 5 the last micro-batch is smaller
        module = toy()
        run = fit(module, prompt_file, Ones(), batch_size=batch_size, updates_per_round=updates)
        found.append(by_update(module.seen))
        losses.append(torch.cat([loss for *_, loss in module.seen]))
        assert run.callback_metrics["train/first_ratio_deviation_max"] <= 1e-5
    assert found[0] == found[1] == found[2] and len(found[0]) == 2 * updates
    for samples in found[0].values():
        assert len(samples) == 12 // updates
        assert sum(samples.values()) / len(samples) == pytest.approx(1, abs=1e-6)
        assert max(samples.values()) > min(samples.values())
    for loss in losses:
        assert loss.double().mean().item() == pytest.approx(-1, abs=2e-5)  # small batches round ratios to 1e-5


def test_a_module_that_is_fitted_again_has_the_weights_of_its_new_run(prompt_file):
    module = toy()
    for prompts_per_round in (2, 5):  # the same round and update, of other groups
        module.seen.clear()
        fit(module, prompt_file, prompts_per_round=prompts_per_round, batch_size=20, trainer={"max_epochs": 1})
        (samples,) = by_update(module.seen).values()
        assert sum(samples.values()) / len(samples) == pytest.approx(1, abs=1e-6)


def test_any_size_of_micro_batch_makes_the_same_update(prompt_file):
    ends = []
    for batch_size in (12, 5, 1):
        module = toy(clip=1.0)
        fit(module, prompt_file, lr=1e-2, batch_size=batch_size, trainer={"max_epochs": 1})
        ends.append(module.policy.transformer.weight.detach())
    start = toy()
    start.configure_model()
    moved = (ends[0] - start.policy.transformer.weight).norm()
    assert moved > 1e-5
    assert all((end - ends[0]).norm() < 1e-3 * moved for end in ends)


def test_ratios_leave_one_after_an_update(prompt_file):
    module = toy(clip=1.0)
    run = fit(module, prompt_file, lr=0.1, updates_per_round=2, trainer={"max_epochs": 1})
    assert run.callback_metrics["train/first_ratio_deviation_max"] <= 1e-6
    assert run.callback_metrics["train/ratio_deviation"] > 1e-5


def test_each_sample_costs_one_backward_where_flow_grpo_takes_one_a_step(prompt_file):
    cost = {}
    for algorithm in (FlashGRPO, FlowGRPO):
        module = toy(algorithm)
        run = fit(module, prompt_file, batch_size=5, trainer={"max_epochs": 3})
        cost[algorithm] = module.backward_rows
        assert run.callback_metrics["cost/backward_rows"] == module.backward_rows
        assert module.forward_rows == module.backward_rows + 3 * 12 * 10  # and ten of the rollout each
    assert cost[FlashGRPO] == 3 * 12
    assert cost[FlowGRPO] == 9 * cost[FlashGRPO]


class Report(L.Callback):
    """Leaves what a rank saw in a file, since nothing else comes back from a forked process."""

    def __init__(self, folder):
        self.folder, self.kept = folder, {}

    def on_rollout_end(self, trainer, module, rollout):
        steps = kept_steps(module, rollout).flatten().tolist()
        self.kept |= {(module.loader.round, i): k for i, k in zip(rollout.sample_ids.tolist(), steps)}

    def on_fit_end(self, trainer, module):
        found = {"kept": self.kept, "weights": by_update(module.seen), "end": module.policy.transformer.weight.detach()}
        torch.save(found, self.folder / f"{trainer.global_rank}.pt")


@pytest.mark.distributed
def test_two_ranks_share_the_steps_and_weights_of_one(prompt_file, tmp_path):
    found = {}
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        many = {"strategy": "ddp_fork", "devices": ranks} if ranks > 1 else {}
        sizes = {"updates_per_round": 2, "batch_size": 2}
        fit(toy(clip=1.0), prompt_file, Report(folder), lr=0.1, trainer=many, **sizes)
        reports = [torch.load(folder / f"{rank}.pt") for rank in range(ranks)]
        kept = {key: k for report in reports for key, k in report["kept"].items()}
        weights = {u: {i: w for r in reports for i, w in r["weights"][u].items()} for u in reports[0]["weights"]}
        found[ranks] = kept, weights, [report["end"] for report in reports]
    assert found[2][0] == found[1][0] and len(found[1][0]) == 24
    assert found[2][1] == found[1][1] and [len(samples) for samples in found[1][1].values()] == [6] * 4
    start = toy()
    start.configure_model()
    (one,), moved = found[1][2], (found[1][2][0] - start.policy.transformer.weight).norm().item()
    assert moved > 1e-3 and all((end - one).norm().item() < 1e-2 * moved for end in found[2][2])


# -- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window_range": (0, 4)}, r"model.window_range is \[0, 4\]; it must lie within \[0, 3\]"),
        ({"window_range": (2, 2)}, r"model.window_range is \[2, 2\]"),
        ({"eta": 0.0}, "model.eta is 0.0"),
        ({"solver": "dpm2"}, "stochastic steps need 'euler'"),
        ({"sigmas": [1.0, 0.0]}, "model.num_steps is 1"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        make(FlashGRPO, **options)


def test_there_is_no_window_to_set():
    with pytest.raises(TypeError, match="'window'"):
        make(FlashGRPO, window=2)
