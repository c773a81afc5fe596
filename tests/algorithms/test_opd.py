"""On-policy distillation: weights and gradients by hand, teachers asked once and left alone, and no need of rewards."""

import json
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
import torch
import yaml
from torch import Tensor, nn

from lit_diffrl.algorithms import DiffusionOPD, FlowGRPO, ReinforceOPD, opd
from lit_diffrl.callbacks import FunctionReward
from lit_diffrl.policies import LoRA, SD3Policy
from lit_diffrl.policies.saved import CONFIG_KEY
from lit_diffrl.policies.teachers import Teacher
from lit_diffrl.rollouts import Rollout, RolloutDataModule
from lit_diffrl.sampling import Kernel
from lit_diffrl.sampling.noise import randn
from tests import helpers
from tests.algorithms.test_losses import SIGMAS, flow, gradient, make, normal, rows
from tests.algorithms.toy import SHAPE, ToyPolicy
from tests.test_resume import Memory, Stop, StopAfter

STEPS = len(SIGMAS) - 1
ELEMENTS = 4


def shifted(s: float) -> float:
    return 3 * s / (1 + 2 * s)


# Of SD3 in 10 steps: evenly spaced between the shifted ends of training, and shifted once more.
SD3 = [shifted(s) for s in torch.linspace(1, shifted(0.001), 10, dtype=torch.float64).tolist()] + [0.0]


def student(algorithm=DiffusionOPD, teachers=("*",), null: bool = False, **options):
    """An algorithm around the toy policy, with moved copies of it as teachers, and what collecting asks of a trainer.

    With ``null`` the teachers are the student as it is.
    """
    named = teachers if isinstance(teachers, dict) else {source: "nowhere" for source in teachers}
    module = make(algorithm, teachers=named, **options)
    for i in range(len(named)):
        module.policy.roles.add(f"teacher_{i}")
        if not null:
            move(module.policy.roles.copies[f"teacher_{i}"], 10 + i)
    module._trainer = SimpleNamespace(precision_plugin=SimpleNamespace(forward_context=nullcontext))
    return module


def move(transformer: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in transformer.parameters():
        p.data += 0.3 * torch.randn(p.shape, generator=generator)


def drawn(module, sources=("a", "b", "a"), round_: int = 1) -> Rollout:
    """A round of the module; not the first one, in which a teacher must differ."""
    n = len(sources)
    blank = Rollout([f"p{'x' * i}" for i in range(n)], sources=sources, seeds=torch.arange(n) + 7)
    return module.collect(blank, round_)


def at(rollout: Rollout, k: int) -> Rollout:
    """The micro-batch of one step of all samples."""
    return rollout.rows(torch.arange(len(rollout)), torch.full((len(rollout),), k))


def by_hand(transformer: nn.Linear, latents: Tensor, timestep: Tensor, prompts: list[str]) -> Tensor:
    """The velocity of the toy policy with some weights."""
    length = torch.tensor([[float(len(p))] for p in prompts])
    flat = latents.flatten(1) @ transformer.weight.detach().T + transformer.bias.detach()
    return (flat + timestep[:, None] / 1000 + 0.1 * length).view_as(latents)


def weight_of(module, sigmas: list[float]) -> Tensor:
    """What multiplies the squared difference at each step but the last of a grid."""
    levels, n = torch.tensor(sigmas), len(sigmas) - 2
    kept = {"sigma": levels[:n], "sigma_next": levels[1 : n + 1], "latents": torch.zeros(n, *SHAPE)}
    return module.weight(torch.ones(n, *SHAPE), kept)


# -- the loss --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step_weight", ["paper", "released", "uniform", "self_normalized"])
@pytest.mark.parametrize("eta", [0.0, 0.7])
def test_a_student_that_is_its_teacher_has_neither_loss_nor_gradient_at_any_step(eta, step_weight):
    module = student(null=True, eta=eta, step_weight=step_weight)
    rollout = drawn(module)
    for k in range(STEPS - 1):
        loss, _ = module.loss(at(rollout, k))
        assert (loss == 0).all() and (gradient(loss.sum(), module.policy) == 0).all()
    module.policy.move(4)  # and only there
    for k in range(STEPS - 1):
        loss, _ = module.loss(at(rollout, k))
        assert (loss > 1e-5).all() and gradient(loss.sum(), module.policy).abs().max() > 1e-4


@pytest.mark.parametrize("eta", [0.0, 0.7])
def test_the_loss_is_the_divergence_of_the_two_steps(eta):
    module = student(eta=eta)
    rollout = drawn(module)
    for k in range(STEPS - 1):
        batch = at(rollout, k)
        x, t = batch.transitions["latents"], batch.transitions["timestep"]
        v = module.velocity(x, t, batch.prompts)
        taught = by_hand(module.policy.roles.copies["teacher_0"], x, t, batch.prompts)
        a, b, std = flow(SIGMAS, k, eta) if eta else (1.0, SIGMAS[k + 1] - SIGMAS[k], 1.0)
        expected = rows(((a * x + b * v) - (a * x + b * taught)) ** 2) / (2 * std**2)
        loss, metrics = module.loss(batch)
        torch.testing.assert_close(loss, expected, atol=1e-6, rtol=1e-4)
        torch.testing.assert_close(metrics["distance_teacher"], rows((v - taught) ** 2), atol=1e-6, rtol=1e-5)
        ours, theirs = (gradient(y.sum(), module.policy) for y in (loss, expected))
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("kernel", ["flow", "dance", "linear", "cps"])
def test_the_closed_form_is_the_mean_of_the_log_ratio_over_next_states(kernel):
    module = student(eta=0.6, kernel=kernel)
    rollout, n = drawn(module, ["a"]), 20_000
    levels = torch.tensor(SIGMAS, dtype=torch.float64)
    for k in range(STEPS - 1):
        batch = at(rollout, k)
        x = batch.transitions["latents"].double()
        v = module.velocity(batch.transitions["latents"], batch.transitions["timestep"], batch.prompts).detach()
        a, b, std = Kernel(kernel, 0.6).transition(levels[k], levels[k + 1], levels)
        ours, theirs = (a * x + b * y.double() for y in (v, batch.transitions["teacher_velocity"]))
        x_next = ours + std * normal(n, *SHAPE, seed=k)
        ratios = rows(((x_next - theirs) ** 2 - (x_next - ours) ** 2) / (2 * std**2))
        loss = module.loss(batch)[0].item()
        assert abs(ratios.mean().item() - loss) < 3 * ratios.std().item() / n**0.5
        assert loss > 3 * ratios.std().item() / n**0.5  # which tells it from zero


@pytest.mark.parametrize("a", [0.1, 0.7, 1.2])
def test_stochastic_steps_weigh_by_the_noise_level_and_the_odds_of_data(a):
    expected = [(1 + a**2 / 2) ** 2 / (2 * a**2) * (s - t) * (1 - s) / s for s, t in pairwise(SD3[1:-1])]
    weight = weight_of(student(eta=a, sigmas=SD3), SD3)
    assert weight[1:].tolist() == pytest.approx(expected, rel=2e-4)  # but at pure noise, where the odds are zero
    assert weight[0] > 0


def test_deterministic_steps_weigh_half_the_square_of_their_length():
    expected = [0.5 * (s - t) ** 2 for s, t in pairwise(SD3[:-1])]
    for step_weight in ("paper", "released"):
        weight = weight_of(student(sigmas=SD3, step_weight=step_weight), SD3)
        assert weight.tolist() == pytest.approx(expected, rel=1e-4)


def test_the_weights_on_the_grid_of_sd3_are_those_of_the_literature():
    still = weight_of(student(sigmas=SD3), SD3).tolist()
    noisy = weight_of(student(eta=0.7, sigmas=SD3), SD3).tolist()
    assert still == pytest.approx([0.0008, 0.0011, 0.0015, 0.0023, 0.0035, 0.0055, 0.0094, 0.0174, 0.0362], abs=6e-5)
    assert noisy[0] == pytest.approx((SD3[0] - SD3[1]) ** 2 / (2 * 0.7**2), rel=1e-3)  # bounded by 1 / (1 - s_1)
    assert noisy[1:6] == pytest.approx([0.0031, 0.0083, 0.0177, 0.0349, 0.0688], abs=6e-5)
    assert noisy[6:] == pytest.approx([0.143, 0.340, 1.105], abs=5.1e-4)
    assert [x[-1] / sum(x) for x in (still, noisy)] == pytest.approx([0.46, 0.64], abs=0.01)


def test_the_released_weight_lacks_the_division_by_the_length_of_the_step():
    paper, released = (weight_of(student(eta=0.7, sigmas=SD3, step_weight=w), SD3) for w in ("paper", "released"))
    lengths = [s - t for s, t in pairwise(SD3[:-1])]
    assert (released / paper).tolist() == pytest.approx(lengths, rel=1e-4)


@pytest.mark.parametrize("eta", [0.0, 0.7])
def test_uniform_weights_leave_the_squared_difference(eta):
    module = student(eta=eta, step_weight="uniform")
    loss, metrics = module.loss(at(drawn(module), 1))
    assert torch.equal(loss, metrics["distance_teacher"]) and (loss > 1e-3).all()


def test_self_normalized_rows_have_gradients_of_one_size():
    module = student(step_weight="self_normalized")
    batch = at(drawn(module), 1)
    taught = batch.transitions["teacher_velocity"]
    # Differences of one shape and of three sizes.
    v = (taught + randn(SHAPE, [1]) * torch.tensor([0.1, 1.0, 10.0]).view(3, 1, 1, 1)).requires_grad_()
    module.velocity = lambda *args, **options: v
    loss, _ = module.loss(batch)
    difference = (v - taught).detach()
    torch.testing.assert_close(loss.detach(), rows(difference**2) / rows(difference.abs()))
    slope = torch.autograd.grad(loss.sum(), v)[0]
    torch.testing.assert_close(slope, 2 * difference / rows(difference.abs()).view(3, 1, 1, 1) / ELEMENTS)
    torch.testing.assert_close(slope[0], slope[2], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("gap", [0.3, 2.0])
def test_means_at_a_distance_of_d_deviations_cost_half_its_square(gap):
    s, s_next = SIGMAS[1:3]
    eta = (s - s_next) ** -0.5  # so that the noise of the step has deviation 1
    module = student(eta=eta, kernel="dance")
    batch = at(drawn(module), 1)
    b = (1 + eta**2 * (1 - s) / (2 * s)) * (s - s_next)
    module.velocity = lambda *args, **options: batch.transitions["teacher_velocity"] + gap / b
    assert module.loss(batch)[0].tolist() == pytest.approx([gap**2 / 2] * 3, rel=1e-4)


# -- the policy gradient ---------------------------------------------------------------------------------------------


def replayed(module, k: int, n: int) -> tuple[Rollout, Tensor]:
    """``n`` next states of one state at step k in float64, and the velocity in training."""
    batch = at(drawn(module, ["a"]), k)
    kept = {key: x.double() for key, x in batch.transitions.items()}
    v = module.velocity(batch.transitions["latents"], batch.transitions["timestep"], batch.prompts).detach().double()
    step = module.transition(kept)
    mean = step.mean(kept["latents"], v)
    kept = {key: x.expand(n, *x.shape[1:]) for key, x in kept.items()}
    kept["next_latents"] = mean + step.std * normal(n, *SHAPE, seed=3)
    kept["log_prob"] = step.log_prob(kept["next_latents"], mean.expand(n, *SHAPE))
    v = v.expand(n, *SHAPE).clone().requires_grad_()
    module.velocity = lambda *args, **options: v
    many = Rollout(["p"] * n)
    many.transitions = kept
    return many, v


def within(samples: Tensor, mean: Tensor, errors: float = 4.0) -> bool:
    """Whether the mean of samples (N, ...) is the given one, element by element, to that many standard errors."""
    return bool(((samples.mean(0) - mean).abs() < errors * samples.std(0) / len(samples) ** 0.5).all())


@pytest.mark.parametrize("k", range(STEPS - 1))
def test_the_policy_gradient_has_the_mean_of_the_closed_form_and_a_spread(k):
    n, module = 100_000, student(ReinforceOPD)
    batch, v = replayed(module, k, n)
    sampled = torch.autograd.grad(module.loss(batch)[0].sum(), v)[0]
    module = student(DiffusionOPD, eta=0.7)
    module.velocity = lambda *args, **options: v
    closed = torch.autograd.grad(module.loss(batch)[0].sum(), v)[0]
    assert (closed == closed[0]).all() and closed[0].abs().min() > 1e-4  # no spread at all
    assert within(sampled, closed[0])
    # Of (delta e + |delta|^2 / 2) c e, with delta the distance of the means and e the noise, over the elements.
    _, b, std = flow(SIGMAS, k, 0.7)
    gain = b / std
    square = (gain * (v[0] - batch.transitions["teacher_velocity"][0])).square().sum().item()
    spread = (gain / ELEMENTS) ** 2 * ((ELEMENTS + 1) * square + ELEMENTS * square**2 / 4)
    assert sampled.var(0).sum().item() == pytest.approx(spread, rel=0.03) and spread > 1e-4


def test_the_divergence_of_the_same_step_as_an_advantage_teaches_nothing_on_average():
    module = student(ReinforceOPD)
    batch, v = replayed(module, 1, 100_000)
    kept = batch.transitions
    divergence = module.transition(kept).kl(v, kept["teacher_velocity"])
    closed = torch.autograd.grad(divergence.sum(), v)[0][0]
    wrong = torch.autograd.grad((divergence.detach() * ratio(module, kept, v)).sum(), v)[0]
    right = torch.autograd.grad(module.loss(batch)[0].sum(), v)[0]
    nothing = torch.zeros(SHAPE, dtype=torch.float64)
    assert within(wrong, nothing) and not within(wrong, closed)
    assert within(right, closed) and not within(right, nothing)


def ratio(module, kept: dict[str, Tensor], v: Tensor) -> Tensor:
    step = module.transition(kept)
    return (step.log_prob(kept["next_latents"], step.mean(kept["latents"], v)) - kept["log_prob"]).exp()


@pytest.mark.parametrize(("log_ratio", "learns"), [(0.05, (True, False)), (-0.05, (False, True))])
def test_the_policy_gradient_stops_where_the_ratio_has_gone_far_enough(log_ratio, learns):
    """A costly draw is learnt from until it is less likely, one that saves until it is more likely."""
    module = student(ReinforceOPD, clip=0.01)
    batch, v = replayed(module, 1, 4000)
    cost = module.loss(batch)[1]["cost"]
    batch.transitions["log_prob"] = batch.transitions["log_prob"] - log_ratio
    loss, metrics = module.loss(batch)
    slope = torch.autograd.grad(loss.sum(), v)[0].flatten(1).abs().amax(1)
    cost = cost - ELEMENTS * log_ratio  # as the loss sees it now
    for rows_, learnt in zip((cost > 0, cost < 0), learns):
        assert rows_.sum() > 20 and bool((slope[rows_] > 1e-6).all()) == bool((slope[rows_] > 0).any()) == learnt
    assert (metrics["clip_fraction"] == 1).all()
    torch.testing.assert_close(metrics["cost"], cost)


# -- teachers in the loop --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [DiffusionOPD, ReinforceOPD])
def test_what_is_kept_of_a_round_carries_no_gradient(algorithm):
    module = student(algorithm)
    rollout = drawn(module)
    assert not any(x.requires_grad for x in rollout.transitions.values())
    assert not any(p.requires_grad for p in module.policy.roles.copies.parameters())
    assert all(p.requires_grad for p in module.policy.transformer.parameters())


@pytest.mark.parametrize("named", [("a", "*"), ("*", "a"), ("a", "b", "c")])
def test_each_prompt_is_taught_by_the_teacher_of_its_source(named):
    module = student(teachers=named)
    sources = ["c", "a", "b", "a"]
    for k in range(STEPS - 1):
        batch = at(drawn(module, sources), k)
        kept = batch.transitions
        for i, source in enumerate(sources):
            own = named.index(source if source in named else "*")
            taught = [
                by_hand(
                    module.policy.roles.copies[f"teacher_{j}"],
                    kept["latents"][i : i + 1],
                    kept["timestep"][i : i + 1],
                    batch.prompts[i : i + 1],
                )[0]
                for j in range(len(named))
            ]
            off = [(kept["teacher_velocity"][i] - v).abs().max() for v in taught]
            assert off[own] < 1e-5 and min(x for j, x in enumerate(off) if j != own) > 0.05


def test_a_teacher_has_a_guidance_of_its_own_or_that_of_the_student():
    guided = {"a": Teacher("nowhere", guidance_scale=3.0), "b": Teacher("nowhere", guidance_scale=1.0), "*": "nowhere"}
    module = student(teachers=guided, guidance_scale=2.0, negative_prompt="rather long")
    rollout = drawn(module, ["a", "b", "c"])
    kept, scales = at(rollout, 2).transitions, [3.0, 1.0, 2.0]
    for i, w in enumerate(scales):
        copy, x, t = module.policy.roles.copies[f"teacher_{i}"], kept["latents"][i : i + 1], kept["timestep"][i : i + 1]
        cond, uncond = (by_hand(copy, x, t, [p]) for p in (rollout.prompts[i], "rather long"))
        torch.testing.assert_close(
            kept["teacher_velocity"][i : i + 1], uncond + w * (cond - uncond), atol=1e-5, rtol=1e-5
        )
        assert (cond - uncond).abs().max() > 0.1
    # The student's is that of rollouts and of training.
    x, t = kept["latents"], kept["timestep"]
    cond, uncond = (by_hand(module.policy.transformer, x, t, p) for p in (rollout.prompts, ["rather long"] * 3))
    expected = rows((uncond + 2 * (cond - uncond) - kept["teacher_velocity"]) ** 2)
    torch.testing.assert_close(module.loss(at(rollout, 2))[1]["distance_teacher"], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "steps"),
    [({}, [0, 1, 2]), ({"step_range": (1, 4)}, [1, 2, 3]), ({"step_range": (1, 3), "eta": 0.5}, [1, 2])],
)
def test_the_steps_of_the_range_are_kept(options, steps):
    module = student(**options)
    rollout = drawn(module)
    assert module.rows_per_sample == len(steps)
    levels = torch.tensor(SIGMAS)
    for name, expected in (("sigma", levels[steps]), ("sigma_next", levels[[k + 1 for k in steps]])):
        assert torch.equal(rollout.transitions[name], expected.expand(3, -1))


def test_some_steps_of_each_sample_are_drawn_from_the_range():
    module = student(steps_per_sample=2)
    kept = [drawn(module, ["a"] * 40).transitions for _ in range(2)]
    chosen = {tuple(row) for row in kept[0]["sigma"].tolist()}
    levels = torch.tensor(SIGMAS).tolist()
    assert chosen == {(levels[i], levels[j]) for i, j in ((0, 1), (0, 2), (1, 2))} and module.rows_per_sample == 2
    assert torch.equal(kept[0]["sigma"], kept[1]["sigma"])
    teacher = module.policy.roles.copies["teacher_0"]
    for k in range(2):
        batch = at(drawn(module), k)
        x, t = batch.transitions["latents"], batch.transitions["timestep"]
        torch.testing.assert_close(batch.transitions["teacher_velocity"], by_hand(teacher, x, t, batch.prompts))


# -- runs ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def teacher(tmp_path, monkeypatch):
    """Teachers of the toy policy: a path whose name is the seed by which the weights were moved, 0 for not at all."""

    def add(policy, role, teacher):
        policy.roles.add(role)
        if seed := int(Path(teacher.path).name):
            move(policy.roles.copies[role], seed)

    def path(seed: int) -> str:
        (tmp_path / str(seed)).mkdir(exist_ok=True)
        return str(tmp_path / str(seed))

    monkeypatch.setattr(opd, "add_teacher", add)
    return path


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "p" * (i + 1), "source": "abc"[i % 3]} for i in range(6)]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def toy(teachers: dict, algorithm=DiffusionOPD, lr: float = 0.05, **options):
    optimizer = lambda p: torch.optim.Adam(p, lr=lr)  # noqa: E731
    return algorithm(ToyPolicy(), teachers=teachers, num_steps=STEPS, optimizer=optimizer, **options)


def data(prompts: Path, val: Path | None = None, **options) -> RolloutDataModule:
    defaults = dict(prompts_per_round=6, group_size=1, rollout_batch_size=4, batch_size=4, seed=1)
    return RolloutDataModule(prompts, val, **(defaults | options))


def trainer(*callbacks: L.Callback, **options) -> L.Trainer:
    """Without any reward."""
    run = helpers.trainer(*callbacks, **options)
    run.callbacks = [c for c in run.callbacks if getattr(c, "name", "") != "red"]
    return run


def fit(module, prompts: Path, *callbacks: L.Callback, rounds: int = 2, ckpt: Path | None = None, **options):
    """The trainer of a run, and what it logged in its first and in its last round."""
    memory = Memory()
    run = trainer(*callbacks, max_epochs=rounds, logger=memory)
    run.fit(module, datamodule=data(prompts, **options), ckpt_path=ckpt)
    logged = [row for _, row in sorted(memory.rows.items()) if "train/loss" in row]
    return run, logged[0], logged[-1]


@pytest.mark.parametrize(("algorithm", "options"), [(DiffusionOPD, {}), (DiffusionOPD, {"eta": 0.7})])
def test_the_student_becomes_its_teacher(teacher, prompts, algorithm, options):
    module = toy({"*": teacher(3)}, algorithm, **options)
    _, first, last = fit(module, prompts, rounds=60, updates_per_round=2, batch_size=18)
    assert last["train/loss"] < first["train/loss"] / 100
    assert last["train/distance_teacher"] < first["train/distance_teacher"] / 100


def test_the_policy_gradient_comes_closer_to_the_teacher_too(teacher, prompts):
    module = toy({"*": teacher(3)}, ReinforceOPD, clip=0.2)
    sizes = dict(updates_per_round=2, group_size=8, rollout_batch_size=48, batch_size=72)
    _, first, last = fit(module, prompts, rounds=30, **sizes)
    assert last["train/distance_teacher"] < first["train/distance_teacher"] / 3


def test_training_leaves_the_teachers_as_they_were(teacher, prompts):
    module = toy({"a": teacher(3), "*": teacher(4)})
    fit(module, prompts, rounds=3)
    fresh = ToyPolicy()
    fresh.load()
    assert not any(torch.equal(p, q) for p, q in zip(module.policy.transformer.parameters(), fresh.parameters()))
    for i, seed in enumerate((3, 4)):
        expected = nn.Linear(4, 4)
        expected.load_state_dict(fresh.transformer.state_dict())
        move(expected, seed)
        copy = module.policy.roles.copies[f"teacher_{i}"]
        assert all(torch.equal(p, q) for p, q in zip(copy.parameters(), expected.parameters()))
        assert not any(p.requires_grad or p.grad is not None for p in copy.parameters())
    kept = module.policy.trainable_state(module.state_dict(), "policy.")
    assert not any("teacher" in key for key in kept) and any("transformer" in key for key in kept)


class Routes(L.Callback):
    """Looks at each row: which of the teachers, known by their seeds, gave its velocity."""

    def __init__(self):
        self.seen = []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        fresh = ToyPolicy()
        fresh.load()
        weights, close = fresh.transformer.state_dict(), {}
        for seed in (3, 4):
            copy = nn.Linear(4, 4)
            copy.load_state_dict(weights)
            move(copy, seed)
            kept = batch.transitions
            off = by_hand(copy, kept["latents"], kept["timestep"], batch.prompts) - kept["teacher_velocity"]
            close[seed] = off.flatten(1).abs().amax(1) < 1e-5
        pairs = zip(batch.sources, close[3].tolist(), close[4].tolist())
        self.seen.append((trainer.current_epoch, batch_idx, list(pairs)))


def test_prompts_keep_their_teachers_when_a_run_is_taken_up_inside_a_round(teacher, prompts, tmp_path):
    straight, before, after, path = *(Routes() for _ in range(3)), tmp_path / "inside.ckpt"
    options = dict(rounds=3, updates_per_round=3, batch_size=2)
    fit(toy({"a": teacher(3), "*": teacher(4)}), prompts, straight, **options)
    with pytest.raises(Stop):
        fit(toy({"a": teacher(3), "*": teacher(4)}), prompts, before, StopAfter(path, update=5), **options)
    # Routes are by name: the order in which teachers are given is nothing to a checkpoint.
    fit(toy({"*": teacher(4), "a": teacher(3)}), prompts, after, ckpt=path, **options)
    assert straight.seen == before.seen + after.seen and before.seen and after.seen[0][:2] == (1, 6)
    for _, _, routed in straight.seen:
        assert all((three, four) == (source == "a", source != "a") for source, three, four in routed)
    assert {source for *_, routed in after.seen for source, *_ in routed} == {"a", "b", "c"}


@pytest.mark.parametrize("guidance", [1.0, 2.0])
def test_teachers_are_asked_once_for_each_kept_step_however_many_updates_follow(teacher, prompts, guidance):
    module = toy({"*": Teacher(teacher(3), guidance_scale=1.0)}, guidance_scale=guidance, step_range=(1, 3))
    asked, counted, velocity = [], [], module.velocity

    def count(latents, *args, role="default", **options):
        asked.append((role, torch.is_grad_enabled(), len(latents)))
        return velocity(latents, *args, role=role, **options)

    class Count(L.Callback):
        def on_train_epoch_end(self, trainer, module):
            counted.append((module.forward_rows, module.backward_rows))

    def total(role, learning):
        return sum(n for *key, n in asked if key == [role, learning])

    module.velocity = count
    fit(module, prompts, Count(), rounds=3, updates_per_round=2)
    n, kept, branches = 6, 2, 2 if guidance > 1 else 1
    # A row each to find null teachers at the start, which is not counted as training.
    assert total("teacher_0", False) == 3 * n * kept + 1 and total("teacher_0", True) == 0
    assert total("default", True) == 3 * n * kept
    assert total("default", False) == 3 * n * STEPS + 1
    rounds = [tuple(b - a for a, b in zip(x, y)) for x, y in zip([(0, 0), *counted], counted)]
    forward = branches * n * (STEPS + kept) + n * kept
    assert rounds == 3 * [(forward, branches * n * kept)]


def reward(score, name: str = "watch", **options) -> FunctionReward:
    monitor = FunctionReward(score, **options)
    monitor.name = name
    return monitor


def test_no_reward_is_needed_and_none_is_logged(teacher, prompts):
    run, first, last = fit(toy({"*": teacher(3)}), prompts)
    assert run.global_step == 2 and "train/distance_teacher" in last
    assert not any(key.startswith(("reward", "val", "source")) for key in run.callback_metrics)
    assert first.keys() == last.keys()


def test_rewards_watch_without_a_say(teacher, prompts):
    def alone(*rewards):
        module = toy({"*": teacher(3)})
        run, *_ = fit(module, prompts, *rewards, rounds=4, updates_per_round=2)
        return run.callback_metrics, helpers.weights(module)

    def nan(rollout):
        return torch.full((len(rollout),), torch.nan)

    _, plain = alone()
    for rewards in (
        [reward(helpers.redness)],
        [reward(helpers.redness, weight=0.0)],
        [reward(nan)],  # in more rounds than an algorithm that learns from it would take
        [reward(helpers.redness), reward(nan, "broken", weight=0.0)],
    ):
        metrics, weights = alone(*rewards)
        assert all(torch.equal(weights[k], v) for k, v in plain.items()), rewards
        assert "reward/watch" in metrics and "reward/mean" not in metrics
        assert metrics["reward/failed"] == sum(6 for r in rewards if r.function is nan)


def test_held_out_prompts_need_a_reward_before_the_model_loads(teacher, prompts):
    module = toy({"*": teacher(3)})
    module.policy.load = lambda: pytest.fail("loaded")
    with pytest.raises(ValueError, match="no reward: add one"):
        trainer().fit(module, datamodule=data(prompts, prompts))
    module = toy({"*": teacher(3)})
    run = trainer(reward(helpers.redness), limit_val_batches=None)
    run.fit(module, datamodule=data(prompts, prompts))
    assert run.callback_metrics["val/watch"].isfinite() and run.callback_metrics["val/source/b"].isfinite()


def test_algorithms_that_learn_from_rewards_still_ask_for_one(prompts):
    module = FlowGRPO(ToyPolicy(), num_steps=STEPS)
    module.policy.load = lambda: pytest.fail("loaded")
    with pytest.raises(ValueError, match="no reward: add one"):
        trainer().fit(module, datamodule=data(prompts, group_size=2))


def test_a_sample_that_went_astray_is_left_out_of_the_update(teacher, prompts):
    module, valid = toy({"*": teacher(3)}), {}
    collect = module.collect

    def astray(rollout, round_):
        rollout = collect(rollout, round_)
        rollout.transitions["teacher_velocity"][rollout.sample_ids == 4, 1] = torch.inf
        return rollout

    class Valid(L.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            valid.update(zip(batch.sample_ids.tolist(), batch.valid.tolist()))

    module.collect = astray
    *_, last = fit(module, prompts, Valid())
    assert valid == {i: i != 4 for i in range(6)}  # with all of its steps
    assert last["train/skipped_updates"] == 0 and last["train/grad_norm"] > 0
    assert last["train/astray"] == pytest.approx(1 / 6)
    assert all(torch.tensor(x).isfinite() for x in last.values())
    assert all(p.isfinite().all() for p in helpers.weights(module).values())


# -- teachers without anything to teach ------------------------------------------------------------------------------


def test_a_null_teacher_among_others_is_named(teacher, prompts):
    module = toy({"a": teacher(3), "*": teacher(0)})
    with pytest.raises(ValueError, match=rf"the teacher {teacher(0)} of the source '\*' has the velocities"):
        fit(module, prompts)
    assert module.trainer.global_step == 0


def test_a_null_teacher_is_found_though_the_first_round_draws_none_of_its_prompts(teacher, prompts):
    module = toy({"a": teacher(3), "*": teacher(0)})
    with pytest.raises(ValueError, match="has the velocities of the student"):
        fit(module, prompts, prompts_per_round=1)


def test_rounds_without_a_finite_sample_do_no_update_and_end_the_run(teacher, prompts):
    module = toy({"*": teacher(3)})
    collect = module.collect

    def astray(rollout, round_):
        rollout = collect(rollout, round_)
        rollout.transitions["teacher_velocity"].fill_(torch.nan)
        return rollout

    module.collect = astray
    with pytest.raises(RuntimeError, match="no sample is finite in 3 rounds in a row"):
        fit(module, prompts, rounds=5)
    assert module.global_step == 0


@pytest.fixture(scope="module")
def null_teachers(sd35_folder, tmp_path_factory):
    """Saved weights that change nothing: a fresh adapter, a copy of the model, and a run without an update."""
    folder, lora = tmp_path_factory.mktemp("null"), {"rank": 3, "alpha": 5.0}
    adapted, whole = SD3Policy(sd35_folder, lora=LoRA(**lora)), SD3Policy(sd35_folder)
    for policy in (adapted, whole):
        policy.load()
    adapted.export(folder / "lora")
    whole.export(folder / "copy")
    config = {"model": {"init_args": {"policy": {"init_args": {"pretrained": sd35_folder, "lora": lora}}}}}
    state = adapted.trainable_state({f"policy.{k}": v for k, v in adapted.state_dict().items()}, "policy.")
    torch.save({"state_dict": state, CONFIG_KEY: yaml.safe_dump(config)}, folder / "run.ckpt")
    return folder


def tiny_student(folder: str, lora: bool, teacher: str | Teacher, **options) -> DiffusionOPD:
    policy = SD3Policy(folder, lora=LoRA(rank=2, alpha=4) if lora else None)
    return DiffusionOPD(policy, teachers={"*": teacher}, num_steps=2, **options)


@pytest.mark.parametrize("guidance", [1.0, 2.0])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("saved", ["lora", "copy", "run.ckpt"])
def test_a_teacher_that_is_the_student_is_refused_in_the_first_round(
    sd35_folder, prompt_file, null_teachers, saved, lora, guidance
):
    path = str(null_teachers / saved)
    module = tiny_student(sd35_folder, lora, path, guidance_scale=guidance)
    with pytest.raises(ValueError, match=f"the teacher {path} of the source .* nothing to learn"):
        trainer().fit(module, datamodule=data(prompt_file, prompts_per_round=3, rollout_batch_size=3))
    assert module.trainer.global_step == 0


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_the_model_with_another_guidance_is_a_teacher(sd35_folder, prompt_file, null_teachers, lora):
    module = tiny_student(sd35_folder, lora, Teacher(str(null_teachers / "copy"), guidance_scale=4.0))
    run, _, last = fit(module, prompt_file, rounds=1, prompts_per_round=2)
    assert run.global_step == 1 and last["train/distance_teacher"] > 1e-6


# -- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "options", "message"),
    [
        (DiffusionOPD, {"teachers": {}}, "model.teachers is empty"),
        (DiffusionOPD, {"eta": -0.1}, "eta is -0.1"),
        (DiffusionOPD, {"eta": 1.5, "kernel": "cps"}, "eta is 1.5"),
        (DiffusionOPD, {"kernel": "ddim"}, "kernel is 'ddim'"),
        (DiffusionOPD, {"step_range": (0, 5)}, r"model.step_range is \[0, 5\]; it must lie within \[0, 4\]"),
        (DiffusionOPD, {"step_range": (2, 2)}, r"model.step_range is \[2, 2\]"),
        (DiffusionOPD, {"step_range": (-1, 2)}, r"model.step_range is \[-1, 2\]"),
        (DiffusionOPD, {"step_range": (0, 4), "eta": 0.7}, r"must lie within \[0, 3\] for model.eta 0.7"),
        (DiffusionOPD, {"steps_per_sample": 0}, "model.steps_per_sample is 0; it must lie between 1 and 3"),
        (DiffusionOPD, {"step_range": (1, 3), "steps_per_sample": 3}, "model.steps_per_sample is 3"),
        (DiffusionOPD, {"eta": 0.7, "solver": "dpm2"}, "model.solver is 'dpm2'"),
        (ReinforceOPD, {"eta": 0.0}, "model.eta is 0.0"),
        (ReinforceOPD, {"clip": 0.0}, "model.clip is 0.0"),
        (ReinforceOPD, {"solver": "dpm2"}, "model.solver is 'dpm2'"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(algorithm, options, message):
    with pytest.raises(ValueError, match=message):
        make(algorithm, **({"teachers": {"*": "nowhere"}} | options))


def test_deterministic_rollouts_may_use_the_solver_of_second_order_and_their_last_step():
    module = student(solver="dpm2", step_range=(0, STEPS))
    rollout = drawn(module)
    loss, _ = module.loss(at(rollout, STEPS - 1))
    assert (loss > 0).all() and torch.equal(rollout.transitions["sigma_next"][:, -1], torch.zeros(3))


@pytest.mark.parametrize(
    ("teachers", "error", "message"),
    [
        (("a", "d", "*"), ValueError, r"teachers names \['d'\], but the prompts have the sources \['a', 'b', 'c'\]"),
        (("a", "c"), ValueError, r"none for the prompt sources \['b'\], and none under '\*'"),
        (("a", "gone"), FileNotFoundError, "'gone' is neither"),
    ],
)
def test_teachers_that_fit_no_prompt_or_are_not_there_are_refused_before_the_model_loads(
    teacher, prompts, teachers, error, message
):
    named = {source: teacher(i + 1) for i, source in enumerate(teachers)}
    module = toy({"*": "gone"} if "gone" in teachers else named)
    module.policy.load = lambda: pytest.fail("loaded")
    with pytest.raises(error, match=message):
        fit(module, prompts)


def test_sources_without_prompts_in_use_need_no_teacher(teacher, prompts):
    run, *_ = fit(toy({"b": teacher(3)}), prompts, rounds=1, prompt_sources=["b"])
    assert run.global_step == 1
