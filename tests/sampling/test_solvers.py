"""The sampling loop on flows whose solution is known."""

import math
from itertools import pairwise

import pytest
import torch

from lit_diffrl.sampling import Kernel, Schedule, sample
from lit_diffrl.sampling.kernels import deterministic
from lit_diffrl.sampling.noise import randn

KERNEL = Kernel("flow", 0.7)


def uniform(n: int, dtype: torch.dtype = torch.float64) -> Schedule:
    sigmas = torch.linspace(1, 0, n + 1, dtype=torch.float64)
    return Schedule(sigmas.to(dtype), (1000 * sigmas[:-1]).to(dtype))


def sd3(n: int, grid: str = "native") -> torch.Tensor:
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    options = {"sigmas": torch.linspace(1, 1 / n, n).tolist()} if grid == "linspace" else {}
    scheduler.set_timesteps(n, **options)
    return scheduler.sigmas.double()


class Gaussian:
    """The exact flow of data N(mean, std^2): its velocity is affine in x."""

    def __init__(self, mean: float, std: float) -> None:
        self.mean, self.std = mean, std

    def line(self, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Slope and offset of the velocity at noise level ``s``."""
        variance = (1 - s) ** 2 * self.std**2 + s**2
        slope = (s - (1 - s) * self.std**2) / variance
        return slope, -self.mean - slope * (1 - s) * self.mean

    def velocity(self, x: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        slope, offset = (c.view(-1, *[1] * (x.ndim - 1)) for c in self.line(timestep.double() / 1000))
        return slope * x + offset

    def exact(self, noise: torch.Tensor) -> torch.Tensor:
        """Where the flow carries noise."""
        return self.mean + self.std * noise

    def moments(self, kernel: Kernel | None, sigmas: torch.Tensor) -> tuple[float, float]:
        """Mean and variance after all steps, without drawing anything."""
        mean, variance = torch.zeros(()).double(), torch.ones(()).double()
        for s, s_next in pairwise(sigmas):
            step = deterministic(s, s_next) if kernel is None else kernel.transition(s, s_next, sigmas)
            slope, offset = self.line(s)
            mean = (step.a + step.b * slope) * mean + step.b * offset
            variance = (step.a + step.b * slope) ** 2 * variance + step.std**2
        return mean.item(), variance.item()


@pytest.mark.parametrize(
    ("n", "stochastic", "plain"), [(10, 0.2300, 0.1856), (50, 0.2485, 0.2356), (400, 0.2511, 0.2482)]
)
def test_a_flow_kernel_repairs_the_variance_that_euler_loses(n, stochastic, plain):
    data, sigmas = Gaussian(1.5, 0.5), uniform(n).sigmas
    for kernel, variance in ((KERNEL, stochastic), (Kernel("flow", 0), plain), (None, plain)):
        assert data.moments(kernel, sigmas) == (pytest.approx(1.5, abs=1e-12), pytest.approx(variance, abs=1e-4))


MARGINALS = {  # final std as a multiple of the true one: n=10 native and linspace, 40, 160, 640 native
    "ode": (None, 0.636, 0.660, 0.907, 0.976, 0.994),
    "flow .7": (Kernel("flow", 0.7), 0.847, 0.835, 0.946, 0.987, 0.997),
    "dance .3": (Kernel("dance", 0.3), 0.726, 0.736, 0.924, 0.980, 0.995),
    "dance 1": (Kernel("dance", 1.0), 1.52, 1.465, 1.040, 1.008, 1.002),
    "linear": (Kernel("linear", 1.0), 0.735, 0.741, 0.923, 0.980, 0.995),
    "cps .5": (Kernel("cps", 0.5), 0.608, 0.63, 0.831, 0.893, 0.913),
    "cps .9": (Kernel("cps", 0.9), 0.544, 0.563, 0.681, 0.729, 0.748),
}


@pytest.mark.parametrize("name", MARGINALS)
def test_marginals_of_the_kernels_on_gaussian_data(name):
    kernel, *expected = MARGINALS[name]
    grids = [sd3(10), sd3(10, "linspace"), sd3(40), sd3(160), sd3(640)]
    for sigmas, ratio in zip(grids, expected):
        mean, variance = Gaussian(0.8, 0.35).moments(kernel, sigmas)
        assert mean == pytest.approx(0.8, abs=1e-6)
        assert math.sqrt(variance) / 0.35 == pytest.approx(ratio, abs=1.5e-3)


def test_drawn_samples_have_the_propagated_moments():
    data, schedule, n = Gaussian(1.5, 0.5), uniform(10, torch.float32), 200_000
    noise = [torch.randn(n, 1, generator=torch.Generator().manual_seed(k)) for k in range(11)]
    stochastic = torch.ones(n, 10, dtype=torch.bool)
    stochastic[:, -1] = False
    drawn = sample(
        data.velocity, noise[10], schedule, kernel=KERNEL, stochastic=stochastic, noise=lambda k: noise[k]
    ).double()
    assert drawn.mean().item() == pytest.approx(1.5, abs=5e-3)
    assert drawn.var().item() == pytest.approx(0.2300, abs=3e-3)


@pytest.mark.parametrize("solver", ["euler", "dpm2"])
@pytest.mark.parametrize("n", [1, 2, 7])
def test_straight_flows_are_solved_exactly(solver, n):
    x_0, noise = torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    result = sample(lambda x, t: noise - x_0, noise, uniform(n), solver=solver)
    torch.testing.assert_close(result, x_0, atol=1e-6, rtol=0)  # the loop keeps velocities in float32


def errors(solver: str) -> list[float]:
    data, noise = Gaussian(0.8, 0.9), torch.linspace(-2, 2, 9, dtype=torch.float64)[:, None]
    runs = [sample(data.velocity, noise, uniform(n), solver=solver) for n in (80, 160, 320)]
    return [(x - data.exact(noise)).abs().max().item() for x in runs]


def test_euler_converges_at_first_and_dpm2_at_second_order():
    euler, dpm2 = errors("euler"), errors("dpm2")
    for coarse, fine in pairwise(euler):
        assert 1.8 < coarse / fine < 2.2
    for coarse, fine in pairwise(dpm2):
        assert 3.3 < coarse / fine < 4.4  # second order, and a logarithm from the last steps
    assert dpm2[-1] < euler[-1] / 100


def test_dpm2_equals_its_published_formula():
    """``(t/s) x - (1-t)(e^-h - 1) x0``, and ``-1/2 (1-t)(e^-h - 1) (h/h_0) (x0 - x0_previous)`` but for the ends."""
    data, noise, sigmas = Gaussian(0.8, 0.35), torch.randn(5, 2, dtype=torch.float64), sd3(6)
    x, previous = noise, None
    for k, (s, t) in enumerate(zip(sigmas[:-1].tolist(), sigmas[1:].tolist())):
        x0 = x - s * data.velocity(x, torch.full((5,), 1000 * s))
        if t == 0:
            x = x0
        elif k == 0:
            x = t / s * x + (1 - t / s) * x0  # the limit of the first-order step at s = 1
        else:
            h = math.log((1 - t) / t) - math.log((1 - s) / s)
            before = sigmas[k - 1].item()
            h_0 = math.log((1 - s) / s) - math.log((1 - before) / before) if before < 1 else math.inf
            first = t / s * x - (1 - t) * math.expm1(-h) * x0
            x = first - 0.5 * (1 - t) * math.expm1(-h) * h / h_0 * (x0 - previous)
        previous = x0
    ours = sample(data.velocity, noise, Schedule(sigmas, 1000 * sigmas[:-1]), solver="dpm2")
    assert (x - sample(data.velocity, noise, Schedule(sigmas, 1000 * sigmas[:-1]))).abs().max() > 1e-3
    torch.testing.assert_close(ours, x, atol=1e-5, rtol=0)


def test_samples_that_are_stochastic_at_different_steps_equal_runs_of_their_own():
    data, schedule = Gaussian(0.8, 0.35), uniform(5, torch.float32)
    x, seeds = randn((3, 2), [1, 2]), [1, 2]
    masks = torch.tensor([[1, 0, 0, 1, 0], [0, 1, 0, 1, 0]], dtype=torch.bool)

    def run(rows: list[int]) -> torch.Tensor:
        return sample(
            lambda x, t: data.velocity(x, t).float(),
            x[rows],
            schedule,
            kernel=KERNEL,
            stochastic=masks[rows],
            noise=lambda k: randn((3, 2), [seeds[i] for i in rows], k),
        )

    together = run([0, 1])
    assert torch.equal(together, torch.cat([run([0]), run([1])]))
    assert not torch.equal(together, sample(lambda x, t: data.velocity(x, t).float(), x, schedule))


def test_noise_is_drawn_for_stochastic_steps_alone():
    calls = []
    stochastic = torch.tensor([[False, True, False, False], [False, False, False, False]])

    def noise(k: int) -> torch.Tensor:
        calls.append(k)
        return torch.zeros(2, 1)

    sample(
        lambda x, t: x, torch.ones(2, 1), uniform(4, torch.float32), kernel=KERNEL, stochastic=stochastic, noise=noise
    )
    assert calls == [1]


def test_every_step_is_shown_from_where_it_started_to_where_it_ended():
    shown, schedule = [], uniform(4, torch.float32)
    stochastic = torch.tensor([[True, False, True, False], [False, False, True, False]])
    noises = [randn((3,), [5, 6], k) for k in range(4)]
    start = randn((3,), [1, 2])
    result = sample(
        lambda x, t: 0.1 * x,
        start,
        schedule,
        kernel=KERNEL,
        stochastic=stochastic,
        noise=lambda k: noises[k],
        on_step=shown.append,
    )
    assert [step.number for step in shown] == [0, 1, 2, 3]
    assert torch.equal(shown[0].latents, start) and torch.equal(shown[-1].next_latents, result)
    for step, later in pairwise(shown):
        assert torch.equal(step.next_latents, later.latents)
    for k, step in enumerate(shown):
        assert torch.equal(step.stochastic, stochastic[:, k])
        assert torch.equal(step.velocity, 0.1 * step.latents)
        mean = step.transition.mean(step.latents, step.velocity)
        drawn = (step.next_latents - mean) / step.transition.std.expand(2, 1).clamp(min=1e-9)
        mask = stochastic[:, k]
        torch.testing.assert_close(drawn[mask], noises[k][mask], atol=1e-5, rtol=0)
        assert torch.equal(step.next_latents[~mask], mean[~mask])


def test_the_network_is_told_the_timesteps_of_the_schedule_unrounded():
    told = []
    schedule = Schedule(torch.tensor([1, 0.9601, 0.33, 0]), torch.tensor([1000, 960.1234, 330.7]))
    sample(lambda x, t: told.append(t) or x, torch.ones(3, 2), schedule)
    assert torch.equal(torch.stack(told), schedule.timesteps[:, None].expand(3, 3))


@pytest.mark.parametrize(
    ("mask", "solver", "kernel", "message"),
    [
        ([True, False, True], "euler", KERNEL, "last step must be deterministic"),
        ([True, False, False], "dpm2", KERNEL, "'dpm2' cannot take stochastic steps"),
        ([True, False, False], "euler", None, "need a kernel and noise"),
    ],
)
def test_stochastic_steps_that_cannot_be_taken_are_refused(mask, solver, kernel, message):
    stochastic = torch.tensor([[False] * 3, mask])
    with pytest.raises(ValueError, match=message):
        sample(
            lambda x, t: x,
            torch.ones(2, 1),
            uniform(3),
            solver=solver,
            kernel=kernel,
            stochastic=stochastic,
            noise=lambda k: torch.zeros(2, 1),
        )


@pytest.mark.parametrize(
    ("sigmas", "message"),
    [
        ([1.0, 0.5, 0.5, 0.0], "descend strictly"),
        ([1.0, 0.5, 0.2, 0.1], "to 0"),
        ([1.2, 0.5, 0.2, 0.0], "at most 1"),
        ([1.0, float("nan"), 0.2, 0.0], "descend"),
        ([1.0, 0.5, 0.0], r"T\+1 sigmas"),
    ],
)
def test_grids_on_which_the_formulas_fail_are_refused(sigmas, message):
    with pytest.raises(ValueError, match=message):
        Schedule(torch.tensor(sigmas), torch.tensor([1000.0, 500.0, 200.0]))


def test_noise_levels_in_half_precision_are_refused():
    with pytest.raises(ValueError, match="bfloat16"):
        Schedule(torch.tensor([1, 0.5, 0.0]).bfloat16(), torch.tensor([1000.0, 500.0]))
