"""JAGG against exact gradients: where it is exact, how it errs where it is not, what it costs, and what it inherits."""

import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from torch import Tensor, nn

import lit_diffrl
from lit_diffrl.algorithms import JAGG, FlowGRPO
from lit_diffrl.callbacks import FunctionReward, PromptMatch
from lit_diffrl.policies import SD3Policy
from lit_diffrl.policies.roles import Roles
from lit_diffrl.rollouts import Rollout
from lit_diffrl.sampling import Schedule
from tests import helpers
from tests.algorithms.toy import SHAPE, ToyPolicy

W = 4


def shifted(steps: int) -> list[float]:
    """A grid with the shift of SD3, as uneven as the real ones."""
    return [3 * u / (1 + 2 * u) for u in (1 - k / steps for k in range(steps + 1))]


GRID = shifted(9)


class AnyPolicy(ToyPolicy):
    """Around any network of the latents, the time and the prompt's length; in double precision unless told."""

    def __init__(self, sigmas: list[float], network, dtype: torch.dtype = torch.float64) -> None:
        super().__init__(sigmas)
        self.network, self.dtype = network, dtype

    def load(self) -> None:
        torch.manual_seed(0)
        self.transformer = self.network().to(self.dtype)
        self.roles = Roles(self.transformer)

    def schedule(self, num_steps: int, *_) -> Schedule:
        sigmas = torch.tensor(self.sigmas, dtype=self.dtype)
        return Schedule(sigmas, 1000 * sigmas[:-1])

    def velocity(self, latents: Tensor, timestep: Tensor, cond: dict[str, Tensor], *_, **__) -> Tensor:
        inputs = [latents.flatten(1), timestep[:, None] / 1000, 0.1 * cond["length"]]
        return self.roles.active(torch.cat([x.to(self.dtype) for x in inputs], 1)).view_as(latents)


def affine() -> nn.Module:
    return nn.Linear(6, 4)


def curved() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))


class Replayed(JAGG):
    """Not in the first update of a round, without a trainer that would say so."""

    update_in_round = 1


class OnPolicy(JAGG):
    update_in_round = 0


def make(network=curved, algorithm=Replayed, **options) -> JAGG:
    sigmas = options.pop("sigmas", GRID)
    defaults = {"num_steps": len(sigmas) - 1, "window": W, "clip": 0.5, "diagnose_every": 0}
    module = algorithm(
        AnyPolicy(sigmas, network, options.pop("dtype", torch.float64)),
        **({"window_range": (0, 8)} | defaults | options),
    )
    module.configure_model()
    module.policy.move()
    return module


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def levels(module: JAGG, n: int, first: int | Tensor = 1) -> tuple[Tensor, Tensor]:
    """The noise levels at which the steps of n equal groups start and end; not from 1, where ``flow`` is bounded."""
    sigmas = module.schedule().sigmas
    steps = first + torch.arange(module.window).expand(n, -1)
    return sigmas[steps], sigmas[steps + 1]


def groups(module: JAGG, states: Tensor, sigma: Tensor, sigma_next: Tensor, moved: float = 0.3) -> Rollout:
    """Groups with these states (N, W, ...), their steps drawn by a policy whose velocities are off by ``moved``."""
    n, w = states.shape[:2]
    batch = Rollout(
        [f"p{'x' * i}" for i in range(n)], advantages=normal(n, seed=7).to(states), draws=torch.zeros(n).long()
    )
    x, sigma, sigma_next = states.flatten(0, 1), sigma.flatten(), sigma_next.flatten()
    prompts = [p for p in batch.prompts for _ in range(w)]
    with torch.no_grad():
        now = module.velocity(x, 1000 * sigma, prompts)
    old = now + moved * normal(*x.shape, seed=8).to(x)
    step = module.kernel.transition(sigma, sigma_next, module.schedule().sigmas, 4)
    mean = step.mean(x, old)
    x_next = mean + step.std * normal(*x.shape, seed=9).to(x)
    kept = {
        "latents": x,
        "next_latents": x_next,
        "log_prob": step.log_prob(x_next, mean),
        "velocity": old,
        "sigma": sigma,
        "sigma_next": sigma_next,
        "timestep": 1000 * sigma,
    }
    batch.transitions = {k: y.unflatten(0, (n, w)) for k, y in kept.items()} | {"linearity": torch.zeros(n)}
    return batch


def scattered(module: JAGG, n: int = 6, **options) -> Rollout:
    """Groups whose states have nothing to do with each other."""
    return groups(module, normal(n, module.window, *SHAPE).to(module.policy.dtype), *levels(module, n), **options)


def steps_of(batch: Rollout) -> Rollout:
    """The transitions of the groups, one a row."""
    w = batch.transitions["sigma"].shape[1]
    kept = {k: x.flatten(0, 1) for k, x in batch.transitions.items() if k != "linearity"}
    return Rollout(
        [p for p in batch.prompts for _ in range(w)],
        advantages=batch.advantages.repeat_interleave(w),
        transitions=kept,
    )


def gradient(loss: Tensor, module: JAGG) -> Tensor:
    weights = list(module.policy.transformer.parameters())
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss.sum(), weights)])


def ours(module: JAGG, batch: Rollout) -> Tensor:
    return gradient(module.loss(batch)[0], module)


def exact(module: JAGG, batch: Rollout) -> Tensor:
    """Of the mean loss of the groups, by what Flow-GRPO says of each of their transitions."""
    return gradient(FlowGRPO.loss(module, steps_of(batch))[0] / module.window, module)


def off(a: Tensor, b: Tensor) -> float:
    """Relative error."""
    assert b.norm() > 1e-6
    return ((a - b).norm() / b.norm()).item()


# -- where it is exact -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interpolation", ["time", "index"])
def test_groups_of_two_are_exact_for_any_model_and_trajectory(interpolation):
    module = make(window=2, interpolation=interpolation, clip=0.01)
    batch = scattered(module)
    clipped = module.loss(batch)[1]["clip_fraction"]
    assert 0 < clipped.mean() < 1
    assert off(ours(module, batch), exact(module, batch)) < 1e-10


def chord(module: JAGG, n: int = 6) -> Rollout:
    """Groups whose states lie on straight lines, each as far along as its noise level."""
    sigma, sigma_next = levels(module, n)
    way = ((sigma[:, :1] - sigma) / (sigma[:, :1] - sigma[:, -1:])).view(n, -1, 1, 1, 1)
    assert (way[0].flatten() - torch.linspace(0, 1, module.window)).abs().max() > 0.02
    start, end = normal(n, 1, *SHAPE, seed=1), normal(n, 1, *SHAPE, seed=2)
    return groups(module, start + way * (end - start), sigma, sigma_next)


def test_affine_velocities_on_the_chord_are_exact_with_weights_by_time():
    module = make(affine)
    batch = chord(module)
    assert off(ours(module, batch), exact(module, batch)) < 1e-10


def test_weights_by_index_are_off_on_a_shifted_grid():
    module = make(affine, interpolation="index")
    batch = chord(module)
    assert 3e-3 < off(ours(module, batch), exact(module, batch)) < 1e-1


def test_weights_by_index_and_by_time_agree_on_an_even_grid():
    sigmas = [1 - k / 9 for k in range(10)]
    by_time, by_index = (make(sigmas=sigmas, interpolation=name) for name in ("time", "index"))
    batch = scattered(by_time)
    assert off(ours(by_index, batch), ours(by_time, batch)) < 1e-6  # thirds in single precision


@pytest.mark.parametrize("position", [1, 2])
def test_a_state_off_the_chord_makes_an_error(position):
    module = make(affine)
    batch = chord(module)
    batch.transitions["latents"][:, position] += 0.3 * normal(len(batch), *SHAPE, seed=3)
    assert off(ours(module, batch), exact(module, batch)) > 1e-2


def test_a_curved_velocity_makes_an_error_on_the_chord():
    module = make(curved)
    batch = chord(module)
    assert off(ours(module, batch), exact(module, batch)) > 1e-3


def test_half_the_length_of_a_smooth_trajectory_is_a_quarter_of_the_error():
    module, errors = make(kernel="dance"), []
    for length in (0.1, 0.05, 0.025):
        # Where a group of uneven steps is on a smooth curve; the noise in units of a step is the same for all lengths.
        edges = 0.7 - length * torch.tensor([[0.0, 0.2, 0.5, 1.0, 1.3]], dtype=torch.float64)
        sigma, sigma_next = edges[:, :-1], edges[:, 1:]
        states = torch.sin(3 * sigma[..., None] + torch.arange(4)).view(1, W, *SHAPE)
        batch = groups(module, states, sigma, sigma_next, moved=0.0)
        errors.append(off(ours(module, batch), exact(module, batch)))
    assert errors[0] < 0.1
    assert errors[0] / errors[1] == pytest.approx(4, abs=0.4)
    assert errors[1] / errors[2] == pytest.approx(4, abs=0.2)


# -- what does not matter --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"joint": False}, {"velocities": "fresh"}])
@pytest.mark.parametrize(("algorithm", "moved"), [(OnPolicy, 0.0), (Replayed, 0.3)])
@pytest.mark.parametrize("exact_draws", [0, 3])
def test_one_forward_or_two_and_known_or_fresh_velocities_are_the_same(options, algorithm, moved, exact_draws):
    plain, other = (make(algorithm=algorithm, jagg_frac=0.5, **more) for more in ({}, options))
    batch = scattered(plain, moved=moved)
    batch.draws[:exact_draws] = 1
    assert off(ours(other, batch), ours(plain, batch)) < 1e-12
    torch.testing.assert_close(other.loss(batch)[0], plain.loss(batch)[0], atol=1e-12, rtol=0)


def test_velocities_of_the_rollout_serve_the_first_update_only():
    """A stale velocity must show where it is used, or the comparisons with fresh ones would prove nothing."""
    first, later = (make(algorithm=algorithm) for algorithm in (OnPolicy, Replayed))
    batch = scattered(first)
    assert off(ours(first, batch), ours(later, batch)) > 1e-3


def test_each_group_has_the_gradient_that_it_has_alone():
    module = make(jagg_frac=0.5)
    batch = scattered(module)
    batch.draws[::2] = 1
    together, metrics = module.loss(batch)
    for i in range(len(batch)):
        alone, one = module.loss(batch[torch.tensor([i])])
        torch.testing.assert_close(alone[0], together[i], atol=1e-12, rtol=0)
        weights = list(module.policy.transformer.parameters())
        for x in zip(*(torch.autograd.grad(y, weights, retain_graph=True) for y in (alone[0], together[i]))):
            torch.testing.assert_close(*x, atol=1e-12, rtol=0)
        assert one["clip_fraction"] == metrics["clip_fraction"][i]


def test_signals_are_mixed_in_full_precision_under_autocast():
    class Apart(AnyPolicy):
        """A network that autocast does not touch, so that all that is rounded is rounded by the algorithm."""

        def velocity(self, *args, **kwargs):
            with torch.autocast("cpu", enabled=False):
                return super().velocity(*args, **kwargs)

    module = make(dtype=torch.float32)
    module.policy.__class__ = Apart
    batch = scattered(module)
    plain = ours(module, batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rows, _ = module.loss(batch)
    assert off(gradient(rows, module), plain) < 1e-6  # backward outside, as Lightning does


# -- the value and the signals ---------------------------------------------------------------------------------------


def test_the_logged_loss_is_the_mean_loss_of_the_group_and_not_the_surrogate():
    module = make(clip=0.05, kl=0.1)
    batch = scattered(module)
    rows, metrics = module.loss(batch)
    steps, of_steps = FlowGRPO.loss(module, steps_of(batch))
    torch.testing.assert_close(rows, steps.view(-1, W).mean(1), atol=1e-12, rtol=0)
    assert rows.detach().std() > 0.1
    for name in ("kl", "clip_fraction", "ratio_deviation"):
        torch.testing.assert_close(metrics[name].double(), of_steps[name].double().view(-1, W).mean(1))


def test_a_maximum_over_steps_stays_one():
    module = make(algorithm=OnPolicy)
    batch = scattered(module)
    name = "first_ratio_deviation_max"
    steps = FlowGRPO.loss(module, steps_of(batch))[1][name].view(-1, W)
    # Those between the endpoints are compared with the velocities of the rollout itself, and must not move.
    assert (steps[:, [0, -1]] > 1e-4).all()
    torch.testing.assert_close(module.loss(batch)[1][name], steps[:, [0, -1]].amax(1))


def by_hand(module: JAGG, batch: Rollout, velocity: Tensor) -> tuple[Tensor, Tensor]:
    """Signals (N, W, D) in closed form, ``A r lambda eps / D`` where not clipped, and which are clipped."""
    kept, n = batch.transitions, len(batch)
    x, x_next, old, v = (
        y.view(n, W, 4) for y in (kept["latents"], kept["next_latents"], kept["velocity"], velocity.detach())
    )
    t, length = kept["sigma"][..., None], (kept["sigma"] - kept["sigma_next"])[..., None]
    g = {"flow": module.kernel.eta * (t / (1 - t)).sqrt(), "dance": torch.full_like(t, module.kernel.eta)}
    g = g[module.kernel.name]
    noise, noise_old = (
        (x_next - x + u * length + g**2 / (2 * t) * (x + (1 - t) * u) * length) / (g * length.sqrt()) for u in (v, old)
    )
    ratio = ((noise_old**2 - noise**2) / 2).mean(2, keepdim=True).exp()
    a = batch.advantages[:, None, None]
    gain = length.sqrt() / g + g * length.sqrt() * (1 - t) / (2 * t)
    clipped = ((a > 0) & (ratio > 1 + module.clip)) | ((a < 0) & (ratio < 1 - module.clip))
    return torch.where(clipped, 0.0, a * ratio * gain * noise / 4), clipped[..., 0]


@pytest.mark.parametrize("kernel", ["flow", "dance"])
def test_signals_have_their_closed_form_and_clipped_ones_are_zero(kernel):
    module = make(kernel=kernel, clip=0.02)
    batch = scattered(module, 20)
    flat = steps_of(batch)
    v = normal(80, *SHAPE, seed=4).mul(0.3).add(flat.transitions["velocity"]).requires_grad_()
    signals = torch.autograd.grad(module.objective(v, flat)[0].sum(), v)[0].view(20, W, 4)
    expected, clipped = by_hand(module, batch, v)
    assert 5 < clipped.sum() < 75
    torch.testing.assert_close(signals, expected, atol=1e-12, rtol=1e-9)
    assert (signals[clipped] == 0).all() and (signals[~clipped] != 0).all()


def tabulate(module: JAGG, batch: Rollout) -> Tensor:
    """Put a table in place of the network: the gradient of its rows is what goes backward through the network."""
    known = batch.transitions["latents"].flatten(0, 1)
    with torch.no_grad():
        table = module.velocity(known, batch.transitions["timestep"].flatten(), steps_of(batch).prompts)
    table.requires_grad_()

    def velocity(latents: Tensor, timestep: Tensor, prompts: list[str]) -> Tensor:
        places = (latents.flatten(1)[:, None] == known.flatten(1)).all(2)
        assert (places.sum(1) == 1).all()
        return table[places.int().argmax(1)]

    module.velocity = velocity
    return table


def test_two_mixed_signals_go_backward_in_place_of_all():
    module = make(clip=0.02)
    batch = scattered(module, 20)
    table = tabulate(module, batch)
    signals, _ = by_hand(module, batch, table)
    t = batch.transitions["sigma"][..., None]
    alpha = (t[:, :1] - t) / (t[:, :1] - t[:, -1:])
    expected = torch.zeros(20, W, 4, dtype=torch.float64)
    expected[:, 0], expected[:, -1] = ((1 - alpha) * signals).sum(1) / W, (alpha * signals).sum(1) / W
    went = torch.autograd.grad(module.loss(batch)[0].sum(), table)[0].view(20, W, 4)
    torch.testing.assert_close(went, expected, atol=1e-12, rtol=1e-9)


def clip_all_but(module: JAGG, batch: Rollout, position: int | None) -> None:
    """Move the old log-probabilities so that the ratio is far on the clipped side, or 1 at ``position``."""
    kept, flat = batch.transitions, steps_of(batch)
    step = module.transition(flat.transitions)
    with torch.no_grad():
        now = module.velocity(flat.transitions["latents"], flat.transitions["timestep"], flat.prompts)
    log_prob = step.log_prob(flat.transitions["next_latents"], step.mean(flat.transitions["latents"], now))
    shift = batch.advantages.sign()[:, None].repeat(1, W) * 3 * module.clip
    if position is not None:
        shift[:, position] = 0
    kept["log_prob"] = log_prob.view(-1, W) - shift


def test_a_group_of_clipped_steps_teaches_nothing():
    module = make(clip=0.05)
    batch = scattered(module)
    clip_all_but(module, batch, None)
    rows, metrics = module.loss(batch)
    assert (metrics["clip_fraction"] == 1).all()
    assert (gradient(rows, module) == 0).all()


@pytest.mark.parametrize("position", range(W))
def test_only_the_step_that_is_not_clipped_sends_a_signal(position):
    module = make(clip=0.05)
    batch = scattered(module)
    clip_all_but(module, batch, position)
    table = tabulate(module, batch)
    losses = module.objective(table, steps_of(batch))[0]
    signals = torch.autograd.grad(losses.sum(), table)[0].view(-1, W, 4) / W
    others = [j for j in range(W) if j != position]
    assert (signals[:, others] == 0).all() and (signals[:, position] != 0).all()
    sigma = batch.transitions["sigma"]
    alpha = ((sigma[:, 0] - sigma[:, position]) / (sigma[:, 0] - sigma[:, -1]))[:, None]
    went = torch.autograd.grad(module.loss(batch)[0].sum(), table)[0].view(-1, W, 4)
    torch.testing.assert_close(went[:, 0], (1 - alpha) * signals[:, position], atol=1e-14, rtol=1e-10)
    torch.testing.assert_close(went[:, -1], alpha * signals[:, position], atol=1e-14, rtol=1e-10)
    assert (went[:, 1:-1] == 0).all()


@pytest.mark.parametrize("how", [{"jagg_frac": 0.0}, {"window": 2}])
@pytest.mark.parametrize(
    "options",
    [
        {"kl": 0.3, "kl_mode": "transition"},
        {"kl": 0.3, "kl_mode": "transition_no_dt"},
        {"kl": 0.3, "kl_mode": "velocity"},
        {"guard": True},
        {"step_weight": "inverse_gain"},
        {"guard": True, "kl": 0.3, "kernel": "cps", "eta": 0.5},
    ],
    ids=lambda x: "-".join(f"{k}={v}" for k, v in x.items()),
)
def test_divergence_guard_and_weights_are_those_of_flow_grpo(how, options):
    module = make(**how, **options)
    batch = scattered(module)
    expected = exact(module, batch)
    assert off(ours(module, batch), expected) < 1e-10
    for name in options:  # each option does something
        if name in ("kl", "guard", "step_weight"):
            plain = {"kl": 0.0, "guard": False, "step_weight": "uniform"}[name]
            before = getattr(module, name)
            setattr(module, name, plain)
            assert off(exact(module, batch), expected) > 1e-3
            setattr(module, name, before)


# -- the bias --------------------------------------------------------------------------------------------------------


class OneWeightEach(nn.Module):
    """``w tanh(x)`` with a weight for each sample, so that one backward pass gives the gradient of each."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((samples, 1), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.repeat_interleave(len(x) // len(self.weight), 0) * x[:, :4].tanh()


def walks(module: JAGG, n: int, first: int) -> Rollout:
    """The groups from step ``first`` on of n samples that the module draws, before the first update."""
    grid, x, kept = module.schedule().sigmas, normal(n, *SHAPE), []
    prompts = ["p"] * n
    for k in range(first, first + W):
        sigma, sigma_next = grid[k].expand(n), grid[k + 1].expand(n)
        with torch.no_grad():
            v = module.velocity(x, 1000 * sigma, prompts)
        step = module.kernel.transition(sigma, sigma_next, grid, 4)
        mean = step.mean(x, v)
        x_next = mean + step.std * normal(n, *SHAPE, seed=100 + k)
        kept.append([x, x_next, step.log_prob(x_next, mean), v, sigma, sigma_next, 1000 * sigma])
        x = x_next
    names = ["latents", "next_latents", "log_prob", "velocity", "sigma", "sigma_next", "timestep"]
    transitions = {k: torch.stack(columns, 1) for k, columns in zip(names, zip(*kept))}
    return Rollout(prompts, draws=torch.zeros(n).long(), transitions=transitions | {"linearity": torch.zeros(n)})


def test_a_constant_advantage_biases_the_estimate_and_a_centred_one_does_not():
    """The far endpoint depends on the noises before it; the exact gradient has no such term."""
    n = 8000
    network = partial(OneWeightEach, n)
    options = {"sigmas": shifted(21), "window_range": (4, 8), "algorithm": OnPolicy}
    jagg, plain = (make(network, jagg_frac=share, **options) for share in (1.0, 0.0))
    for module in (jagg, plain):
        module.policy.transformer.weight.data.fill_(0.5)
    batch = walks(jagg, n, first=4)

    def score(module: JAGG, advantages: Tensor) -> float:
        """The mean of the samples' gradients in units of its standard error."""
        batch.advantages = advantages
        g = ours(module, batch)
        assert len(g) == n
        return (g.mean() / g.std() * math.sqrt(n)).item()

    constant = torch.ones(n, dtype=torch.float64)
    reward = 1 + normal(n // 8, 8, seed=5).exp()
    centred = ((reward - reward.mean(1, keepdim=True)) / reward.std(1, keepdim=True)).flatten()
    assert abs(score(plain, constant)) < 3.5
    assert abs(score(jagg, constant)) > 15
    assert abs(score(jagg, centred)) < 3.5
    assert abs(score(jagg, reward.flatten())) > 10  # it is the centring that helps, not the randomness


# -- whole runs ------------------------------------------------------------------------------------------------------


def toy(window: int = W, **options) -> JAGG:
    """Two groups of four steps, or as many as fit, in single precision, as a trainer wants it."""
    sigmas = options.pop("sigmas", GRID)
    steps = len(sigmas) - 1
    defaults = {"num_steps": steps, "window_range": (0, steps - 1), "diagnose_every": 0, "clip": 0.1}
    policy = AnyPolicy(sigmas, options.pop("network", curved), torch.float32)
    optimizer = partial(torch.optim.SGD, lr=1e-2)
    return JAGG(policy, window=window, optimizer=optimizer, **(defaults | options))


def brightness(rollout: Rollout) -> Tensor:
    """Media of the toy are grey, so that all are equally red."""
    return rollout.media.mean((1, 2, 3))


class Watch(L.Callback):
    """What every micro-batch was, and what it sent through the network: (role, rows, with gradient), rows backward."""

    def __init__(self) -> None:
        self.micro_batches: list[SimpleNamespace] = []
        self.forward = self.recorded = 0
        self.learning = False

    def on_fit_start(self, trainer: L.Trainer, module: JAGG) -> None:
        networks = {"default": module.policy.transformer, **module.policy.roles.copies}
        for role, network in networks.items():
            network.register_forward_hook(partial(self.note, role))
        loss = module.loss

        def watched(batch: Rollout):
            now = SimpleNamespace(
                batch=batch, calls=[], backward=0, round=trainer.current_epoch, update=module.update_in_round
            )
            self.micro_batches.append(now)
            self.learning = True
            rows, now.metrics = loss(batch)
            self.learning = False
            now.rows = rows.detach()
            return rows, now.metrics

        module.loss = watched

    def note(self, role: str, network: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        rows, live = len(output), torch.is_grad_enabled()
        self.forward += rows
        self.recorded += rows * live
        if not self.learning:
            return
        now = self.micro_batches[-1]
        now.calls.append((role, rows, live))
        if output.requires_grad:

            def backward(g: Tensor) -> None:
                now.backward += len(g)

            output.register_hook(backward)


def fit(module: JAGG, prompts, rounds: int = 1, **options) -> tuple[Watch, dict[str, Tensor]]:
    watch = Watch()
    run = helpers.trainer(FunctionReward(brightness), watch, max_epochs=rounds)
    run.fit(module, datamodule=helpers.data(prompts, **options))
    assert (watch.forward, watch.recorded) == (module.forward_rows, module.backward_rows)
    metrics = run.callback_metrics
    assert (metrics["cost/forward_rows"], metrics["cost/backward_rows"]) == (watch.forward, watch.recorded)
    return watch, metrics


def test_groups_are_consecutive_steps_of_one_rollout_in_their_order(prompt_file):
    module = toy(sigmas=shifted(13), groups_per_sample=2)
    watch, _ = fit(module, prompt_file, rounds=2, updates_per_round=2, batch_size=3)
    grid, seen = module.schedule().sigmas, []
    for now in watch.micro_batches:
        kept = now.batch.transitions
        first = torch.searchsorted(-grid, -kept["sigma"][:, 0])
        steps = first[:, None] + torch.arange(W)
        assert torch.equal(kept["sigma"], grid[steps]) and torch.equal(kept["sigma_next"], grid[steps + 1])
        assert torch.equal(kept["timestep"], 1000 * grid[steps])
        assert (first % W == 0).all()
        # Bit for bit the same latents: no other rollout comes by them.
        assert torch.equal(kept["next_latents"][:, :-1], kept["latents"][:, 1:])
        if now.round == now.update == 0:
            module.policy.load()  # the weights that drew it
            prompts = steps_of(now.batch).prompts
            with torch.no_grad():
                v = module.velocity(kept["latents"].flatten(0, 1), kept["timestep"].flatten(), prompts)
            torch.testing.assert_close(v, kept["velocity"].flatten(0, 1), atol=1e-5, rtol=1e-5)
        seen += [(now.round, i, k) for i, k in zip(now.batch.sample_ids.tolist(), first.tolist())]
    assert len(seen) == len(set(seen)) == 2 * 8 * 2  # each group of each sample once
    for round_ in (0, 1):
        chosen = {i: sorted(k for r, j, k in seen if (r, j) == (round_, i)) for i in range(8)}
        assert len({tuple(x) for x in chosen.values()}) == 1  # the same steps for all


def planned(module: JAGG, round_: int, rank: int = 0, seed: int = 1, samples: int = 3):
    module._trainer = SimpleNamespace(
        datamodule=SimpleNamespace(seed=seed), global_rank=rank, world_size=2, training=True
    )
    rollout = Rollout(["p"] * samples, seeds=torch.arange(samples) + 1000 * rank)
    return module.plan(rollout, round_)


def test_each_round_draws_groups_of_its_own_equal_on_all_ranks():
    module = make(sigmas=shifted(21), window_range=(4, 20), groups_per_sample=2)
    draws = set()
    for round_ in range(20):
        plan, other = (planned(module, round_, rank) for rank in (0, 1))
        assert torch.equal(plan.kept, other.kept) and torch.equal(plan.stochastic, other.stochastic)
        assert plan.kept.shape == (3, 8) and (plan.kept == plan.kept[0]).all()
        groups = plan.kept[0].view(2, W)
        assert (groups.diff(dim=1) == 1).all() and (groups[:, 0] % W == 0).all()
        assert groups[0, 0] < groups[1, 0] and groups.min() >= 4 and groups.max() < 20
        expected = torch.zeros(3, 21, dtype=torch.bool)
        expected[:, groups.flatten()] = True
        assert torch.equal(plan.stochastic, expected)  # no noise outside of what is trained on
        draws.add(tuple(groups[:, 0].tolist()))
    assert len(draws) >= 4  # of six
    assert any(not torch.equal(planned(module, 0).kept, planned(module, 0, seed=s).kept) for s in range(2, 8))


def test_all_groups_are_kept_in_the_order_of_the_steps_unless_told():
    plan = planned(make(), 0)
    assert plan.kept[0].tolist() == list(range(8))
    assert plan.stochastic[0].tolist() == [True] * 8 + [False]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"window_range": (0, 6)},
            r"window_range \[0, 6\] has 6 steps, .* model.window 4: use .*window_range \[0, 4\]",
        ),
        (
            {"window_range": (1, 8)},
            r"window_range \[1, 8\] has 7 steps, .* model.window 4: use .*window_range \[1, 5\]",
        ),
        ({"window_range": (0, 2)}, r"window_range \[0, 2\] has 2 steps, .* a smaller model.window"),
        ({"window": 1}, "model.window is 1; .* at least 2"),
        ({"groups_per_sample": 0}, "model.groups_per_sample is 0; it must lie between 1 and 2"),
        ({"groups_per_sample": 3}, "model.groups_per_sample is 3; it must lie between 1 and 2"),
        ({"jagg_frac": -0.1}, r"model.jagg_frac is -0.1; it must lie in \[0, 1\]"),
        ({"jagg_frac": 1.1}, r"model.jagg_frac is 1.1"),
        ({"jagg_frac": 0.1}, r"model.jagg_frac is 0.1, which of 2 groups rounds to none"),
        ({"interpolation": "x"}, r"model.interpolation is 'x'; it must be one of 'time', 'index'"),
        ({"diagnose_every": -1}, "model.diagnose_every is -1"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_a_range_of_ones_own_is_refused_without_naming_a_number_of_steps():
    with pytest.raises(ValueError, match=r"use a smaller model.window$"):
        JAGG(ToyPolicy(), num_steps=3, window_range=(0, 2))


@pytest.mark.parametrize(("steps", "last"), [(10, 8), (6, 4), (9, 8), (5, 4)])
def test_without_a_range_the_first_steps_that_make_whole_groups_are_taken(steps, last):
    module = JAGG(ToyPolicy(), num_steps=steps)
    assert (module.window_range, module.groups_per_sample) == ((0, last), last // 4)


def test_too_few_steps_for_a_group_are_refused():
    with pytest.raises(ValueError, match=r"\[0, 3\] has 3 steps, not a multiple of model.window 4: use a smaller"):
        JAGG(ToyPolicy(), num_steps=4)


GRAD, NONE = True, False


@pytest.mark.parametrize(
    ("options", "first", "later"),
    [
        ({}, [("default", 16, GRAD)], [("default", 16, GRAD), ("default", 16, NONE)]),
        ({"joint": False}, [("default", 8, GRAD)] * 2, [("default", 8, GRAD)] * 2 + [("default", 16, NONE)]),
        ({"velocities": "fresh"}, *[[("default", 16, GRAD), ("default", 32, NONE)]] * 2),
        ({"jagg_frac": 0.0}, *[[("default", 32, GRAD)]] * 2),
        ({"jagg_frac": 0.5}, [("default", 24, GRAD)], [("default", 24, GRAD), ("default", 8, NONE)]),
        ({"window": 2, "groups_per_sample": 2}, *[[("default", 16, GRAD)]] * 2),
        (
            {"kl": 0.1},
            [("default", 16, GRAD), ("reference", 32, NONE)],
            [("default", 16, GRAD), ("default", 16, NONE), ("reference", 32, NONE)],
        ),
    ],
    ids=lambda x: "-".join(f"{k}={v}" for k, v in x.items()) if isinstance(x, dict) else "",
)
def test_what_goes_through_the_network_for_eight_groups(prompt_file, options, first, later):
    """Before an update two rows of a group, backward too; after it W - 2 more without gradient. Nothing for kl 0."""
    module = toy(**options)
    watch, _ = fit(module, prompt_file, rounds=2, updates_per_round=2)
    assert [(now.round, now.update, len(now.batch)) for now in watch.micro_batches] == [
        (round_, update, 8) for round_ in (0, 1) for update in (0, 1)
    ]
    for now in watch.micro_batches:
        assert now.calls == (later if now.update else first)
        assert now.backward == sum(rows for _, rows, live in now.calls if live)
    assert list(module.policy.roles.copies) == (["reference"] if "kl" in options else [])


@pytest.mark.parametrize("every", [0, 1, 2])
def test_the_comparison_with_the_exact_gradient_costs_one_group_in_its_rounds(prompt_file, every):
    watch, metrics = fit(toy(diagnose_every=every), prompt_file, rounds=3)
    assert len(watch.micro_batches) == 6
    for i, now in enumerate(watch.micro_batches):
        wanted = every > 0 and i % 2 == 0 and now.round % every == 0
        assert now.calls == [("default", 16, GRAD)] + [("default", W, GRAD)] * wanted
        assert ("gradient_cosine" in now.metrics) == ("gradient_error" in now.metrics) == wanted
    assert ("train/gradient_cosine" in metrics) == ("train/gradient_error" in metrics) == (every > 0)


def test_without_a_signal_there_is_nothing_to_compare(prompt_file):
    module = toy(diagnose_every=1)
    run = helpers.trainer(FunctionReward(lambda rollout: torch.ones(len(rollout))), max_epochs=1)
    run.callbacks = [c for c in run.callbacks if getattr(c, "name", "") != "red"]
    run.fit(module, datamodule=helpers.data(prompt_file))
    assert run.callback_metrics["train/grad_norm"] == 0
    assert run.callback_metrics["train/gradient_cosine"].isnan()


def test_groups_of_two_compare_as_exact_under_autocast(prompt_file):
    module = toy(window=2, diagnose_every=1)
    velocity = module.policy.velocity
    module.policy.velocity = lambda *args, **options: velocity(*args, **options).float()  # as real policies do
    run = helpers.trainer(FunctionReward(brightness), max_epochs=1, precision="bf16-mixed")
    run.fit(module, datamodule=helpers.data(prompt_file))
    assert run.callback_metrics["train/gradient_cosine"] == pytest.approx(1, abs=1e-4)


def test_the_comparison_does_not_change_what_is_learnt(prompt_file):
    plain, other = toy(), toy(diagnose_every=1)
    fit(plain, prompt_file, rounds=2)
    fit(other, prompt_file, rounds=2)
    for ours, theirs in zip(plain.policy.parameters(), other.policy.parameters()):
        assert torch.equal(ours, theirs)


def test_groups_of_two_have_the_direction_and_the_length_of_the_exact_gradient(prompt_file):
    _, metrics = fit(toy(window=2, diagnose_every=1), prompt_file)
    assert metrics["train/gradient_cosine"] == pytest.approx(1, abs=1e-5)
    assert metrics["train/gradient_error"] < 1e-5


class Diagnosed(Replayed):
    loader = SimpleNamespace(round=0, position=1)


@pytest.mark.parametrize("draw", [0, 1])
def test_the_reported_fidelity_is_that_of_the_group_with_the_strongest_signals(draw):
    module = make(algorithm=Diagnosed, diagnose_every=1, jagg_frac=0.5)
    batch = groups(module, normal(3, W, *SHAPE), *levels(module, 3, torch.tensor([[1], [4], [1]])))
    batch.advantages = torch.tensor([1.2, -1.0, 0.3]).double()  # late steps are strong for less
    batch.draws = torch.tensor([0, draw, 0])
    metrics = module.loss(batch)[1]
    strongest, module.diagnose_every = batch[torch.tensor([1])], 0
    strongest.draws = torch.tensor([0])  # interpolated, however it is routed
    a, b = ours(module, strongest), exact(module, strongest)
    others = [exact(module, batch[torch.tensor([i])]).norm() for i in (0, 2)]
    assert b.norm() > 1.5 * max(others) and off(a, b) > 1e-2
    assert metrics["gradient_error"].item() == pytest.approx(off(a, b), rel=1e-9)
    assert metrics["gradient_cosine"].item() == pytest.approx((a @ b / a.norm() / b.norm()).item(), rel=1e-9)


def least_cosine(velocity: Tensor, sigma: Tensor) -> float:
    """Of one group (W, ...), written down as a loop."""
    v, t = velocity.double().flatten(1), sigma.double()
    cosines = []
    for j in range(1, len(v) - 1):
        share = (t[0] - t[j]) / (t[0] - t[-1])
        line = (1 - share) * v[0] + share * v[-1]
        cosines.append((v[j] @ line / (v[j].norm() * line.norm())).item())
    return min(cosines, default=1.0)


@pytest.mark.parametrize("window", [2, 3, 5])
def test_linearity_is_the_least_cosine_with_the_interpolated_velocity(window):
    module = make(window=window, window_range=(0, window))
    sigma = torch.tensor(GRID).double()[:window].expand(3, 2, -1)
    velocity = normal(3, 2, window, *SHAPE)
    linearity = module.linearity(velocity, module.alpha(sigma))
    for i in range(3):
        for g in range(2):
            assert linearity[i, g].item() == pytest.approx(least_cosine(velocity[i, g], sigma[i, g]), abs=1e-12)


def test_half_the_groups_of_each_sample_are_interpolated_and_they_are_the_most_linear(prompt_file):
    module = toy(sigmas=shifted(17), eta=1.0, jagg_frac=0.5)
    watch, metrics = fit(module, prompt_file, batch_size=1)
    routed: dict[int, list[tuple[bool, float, float]]] = {}
    for now in watch.micro_batches:
        kept = now.batch.transitions
        linearity = least_cosine(kept["velocity"][0], kept["sigma"][0])
        assert kept["linearity"].item() == pytest.approx(linearity, abs=1e-5)
        assert now.backward in (2, W)
        routed.setdefault(now.batch.sample_ids.item(), []).append(
            (now.backward == 2, linearity, kept["sigma"][0, 0].item())
        )
    assert len(routed) == 8
    for groups in routed.values():
        assert len({level for *_, level in groups}) == len(groups) == 4
        chosen, others = ([x for yes, x, _ in groups if yes is flag] for flag in (True, False))
        assert len(chosen) == len(others) == 2
        assert min(chosen) > max(others)
    assert len({tuple(sorted(level for yes, _, level in groups if yes)) for groups in routed.values()}) > 1
    mean = sum(x for groups in routed.values() for _, x, _ in groups) / 32
    assert metrics["train/linearity"].item() == pytest.approx(mean, abs=1e-5)


@pytest.mark.parametrize(
    ("share", "total", "routed"), [(0.0, 4, 0), (0.25, 4, 1), (0.3, 4, 1), (0.7, 4, 3), (1.0, 4, 4), (0.5, 3, 2)]
)
def test_the_share_of_interpolated_groups_is_rounded_to_whole_ones(share, total, routed):
    module = make(sigmas=shifted(17), window_range=(0, 16), groups_per_sample=total, jagg_frac=share)
    batch = scattered(module, total)
    batch.draws = torch.arange(total)
    before = module.backward_rows
    module.loss(batch)
    assert module.backward_rows - before == 2 * routed + W * (total - routed)


@pytest.mark.parametrize("joint", [True, False])
def test_ranks_with_other_samples_make_the_same_calls(joint):
    """Routing is by count: what goes through the network follows from the draws, which all ranks deal out alike."""
    calls = []
    for rank in (0, 1):
        module = make(jagg_frac=0.5, joint=joint)
        batch = groups(module, normal(6, W, *SHAPE, seed=rank), *levels(module, 6, first=rank))
        batch.transitions["linearity"] = normal(6, seed=rank)
        batch.advantages *= 1 - rank
        batch.draws = torch.tensor([1, 0, 1, 0, 1, 0])
        calls.append([])
        module.policy.transformer.register_forward_hook(
            lambda network, x, y: calls[-1].append((len(y), torch.is_grad_enabled()))
        )
        module.loss(batch)
    assert calls[0] == calls[1]


@pytest.mark.parametrize("draws", [[0, 0, 0], [0, 1, 0], [1, 1, 1]])
def test_before_the_first_update_every_micro_batch_is_one_call(draws):
    module, rows = make(algorithm=OnPolicy, jagg_frac=0.5), []
    batch = scattered(module, 3, moved=0.0)
    batch.draws = torch.tensor(draws)
    module.policy.transformer.register_forward_hook(lambda network, x, y: rows.append(len(y)))
    module.loss(batch)
    assert rows == [sum(W if draw else 2 for draw in draws)]


def test_the_mean_loss_and_the_linearity_of_a_round_are_logged(prompt_file):
    watch, metrics = fit(toy(kl=0.5), prompt_file, rounds=2, updates_per_round=2)
    last = [now for now in watch.micro_batches if now.round == 1]
    for name, values in (("loss", [now.rows for now in last]), ("kl", [now.metrics["kl"].detach() for now in last])):
        values = torch.cat(values)
        assert len(values) == 16 and values.std() > 1e-3 * values.abs().mean()
        assert metrics[f"train/{name}"].item() == pytest.approx(values.mean().item(), rel=1e-4, abs=1e-7)
    linearity = torch.cat([now.batch.transitions["linearity"] for now in last])
    assert metrics["train/linearity"].item() == pytest.approx(linearity.mean().item(), abs=1e-6)
    assert metrics["train/first_ratio_deviation_max"] < 1e-5


def test_interpolating_nothing_learns_what_flow_grpo_learns(prompt_file):
    """The same rollouts and updates, though a row of the one is a group and a row of the other a step."""
    start, jagg = toy(), toy(jagg_frac=0.0, kl=0.1)
    start.policy.load()
    flow = FlowGRPO(AnyPolicy(GRID, curved, torch.float32), num_steps=9, clip=0.1, kl=0.1, optimizer=jagg.optimizer)
    for module in (jagg, flow):
        helpers.trainer(FunctionReward(brightness)).fit(
            module, datamodule=helpers.data(prompt_file, updates_per_round=2)
        )
    for ours, theirs, before in zip(*(m.policy.transformer.parameters() for m in (jagg, flow, start))):
        assert (theirs - before).abs().max() > 1e-4
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


class Keep(L.Callback):
    """The gradient of an update."""

    def on_before_optimizer_step(self, trainer: L.Trainer, module: JAGG, optimizer: torch.optim.Optimizer) -> None:
        gradients = [p.grad for p in module.policy.transformer.parameters() if p.grad is not None]
        self.gradient = torch.cat([g.flatten() for g in gradients])


def test_the_gradient_of_an_update_of_the_embedded_model_points_the_exact_way(monkeypatch):
    """At the noise level of the paper's runs; the interpolated steps of a group span a fifth of the trajectory."""
    monkeypatch.setattr(helpers, "red", lambda: PromptMatch(mode="mean"))
    prompts, found = Path(lit_diffrl.__file__).parent / "policies/embedded/shapes/prompts/train.jsonl", []
    options = {"num_steps": 20, "window_range": (0, 16), "kernel": "dance", "eta": 0.3, "diagnose_every": 0}
    for share in (1.0, 0.0):
        module, keep = JAGG(SD3Policy("embedded:shapes"), window=W, jagg_frac=share, **options), Keep()
        helpers.trainer(keep, max_epochs=1).fit(module, datamodule=helpers.data(prompts, batch_size=16))
        found.append(keep.gradient)
    interpolated, plain = found
    assert torch.cosine_similarity(interpolated, plain, dim=0) >= 0.97
    assert (interpolated.norm() / plain.norm()).item() == pytest.approx(1, abs=0.15)
