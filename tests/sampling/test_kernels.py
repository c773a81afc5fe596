"""Stochastic steps against closed forms, independent formulas and published numbers."""

import math

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from lit_diffrl.sampling import Kernel, Transition
from lit_diffrl.sampling.kernels import deterministic

KERNELS = [Kernel("flow", 0.7), Kernel("dance", 0.3), Kernel("linear", 1.0), Kernel("cps", 0.8)]
NAMES = [k.name for k in KERNELS]
GRID = torch.tensor([1, 0.75, 0.5, 0.25, 0], dtype=torch.float64)
# What diffusers 0.42 gives for SD3.5 with 10 steps, printed to four digits.
SD35 = torch.tensor([1, 0.9601, 0.9133, 0.8577, 0.7904, 0.7073, 0.6022, 0.4649, 0.2780, 0.0089, 0], dtype=torch.float64)


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def steps(kernel: Kernel, grid: torch.Tensor, ndim: int = 1) -> Transition:
    """All steps of a grid as one batch."""
    return kernel.transition(grid[:-1], grid[1:], grid, ndim)


def latents(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_the_flow_kernel_has_the_means_deviations_and_densities_of_the_closed_form():
    step = steps(Kernel("flow", 0.7), GRID)
    mean = step.mean(tensor(0.8, 0.8, 0.8, 0.8), tensor(-0.4, -0.4, -0.4, -0.4))
    torch.testing.assert_close(mean, tensor(0.704, 0.7285, 0.8265, 0.859167), atol=1e-6, rtol=0)
    torch.testing.assert_close(step.std, tensor(0.7, 0.606218, 0.35, 0.202073), atol=1e-6, rtol=0)
    density = step.log_prob(mean + step.std, mean)
    torch.testing.assert_close(density, tensor(-1.062264, -0.918423, -0.369116, 0.180190), atol=1e-6, rtol=0)


@pytest.mark.parametrize("step", [steps(Kernel("flow", 0), GRID), deterministic(GRID[:-1], GRID[1:])])
def test_without_noise_a_step_is_that_of_euler_and_has_no_log_probability(step):
    x, v = tensor(0.8, 0.8, 0.8, 0.8), tensor(-0.4, -0.4, -0.4, -0.4)
    assert (step.mean(x, v) - tensor(0.9, 0.9, 0.9, 0.9)).abs().max() < 1e-15
    assert (step.std == 0).all()
    with pytest.raises(ValueError, match=r"deterministic step .* has no log-probability"):
        step.log_prob(x, x)


def test_one_deterministic_sample_in_a_batch_has_no_log_probability_either():
    step = Transition(torch.ones(2, 1), torch.ones(2, 1), torch.tensor([[0.5], [0.0]]))
    with pytest.raises(ValueError, match="std 0"):
        step.log_prob(torch.zeros(2, 3), torch.zeros(2, 3))


def test_the_flow_kernel_has_the_published_noise_and_gain_on_the_grid_of_sd35():
    step = steps(Kernel("flow", 0.7), SD35)
    sigma = step.std / (-SD35.diff()).sqrt()
    published = tensor(3.506, 3.435, 2.273, 1.719, 1.359, 1.088, 0.861, 0.652, 0.434, 0.066)
    torch.testing.assert_close(sigma, published, atol=2e-3, rtol=1e-3)
    published = tensor(0.700, 0.743, 0.536, 0.446, 0.392, 0.353, 0.319, 0.282, 0.225, 0.006)
    torch.testing.assert_close(step.std, published, atol=6e-4, rtol=0)
    published = tensor(0.0570, 0.0784, 0.1292, 0.1880, 0.2640, 0.3710, 0.5356, 0.8248, 1.4867, 1.7706)
    torch.testing.assert_close(step.gain, published, atol=1e-4, rtol=3e-3)


def test_the_linear_kernel_has_the_published_inverse_gains_of_wan():
    from diffusers import UniPCMultistepScheduler

    published = {
        20: "7.4887 7.0526 6.6221 6.1973 5.7785 5.3659 4.9599 4.5607 4.1687 3.7842 3.4074 3.0386 2.6781 2.3260 1.9822 "
        "1.6464 1.3179 .9950 .6745 .3461",
        12: "5.6627 5.1136 4.5763 4.0518 3.5411 3.0455 2.5659 2.1034 1.6590 1.2325 .8222 .4180",
    }
    for n, table in published.items():
        scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
        scheduler.set_timesteps(n)
        inverse = 1 / steps(Kernel("linear", 1.0), scheduler.sigmas).gain
        torch.testing.assert_close(inverse, torch.tensor([float(x) for x in table.split()]), atol=2e-4, rtol=0)


@pytest.mark.parametrize(
    ("kernel", "gain"),
    [
        (Kernel("flow", 0.7), lambda s, dt: (1 / 0.7 + 0.35) * (dt * (1 - s) / s).sqrt()),
        (Kernel("dance", 0.3), lambda s, dt: dt.sqrt() * (1 / 0.3 + 0.3 * (1 - s) / (2 * s))),
        (Kernel("linear", 1.0), lambda s, dt: dt.sqrt() * (1 / (0.75 * s) + 0.75 * (1 - s) / 2)),
    ],
    ids=["flow", "dance", "linear"],
)
def test_the_gain_has_its_closed_form(kernel, gain):
    inner = slice(1, None)  # the first step of flow bounds its noise
    expected = gain(GRID[:-1], -GRID.diff())
    torch.testing.assert_close(steps(kernel, GRID).gain[inner], expected[inner], atol=1e-14, rtol=0)


def test_the_gain_of_cps_has_its_closed_form():
    grid = GRID[:-1]  # the last step has no noise
    s, s_next = grid[:-1], grid[1:]
    std = s_next * math.sin(0.8 * math.pi / 2)
    k = -s * (1 - s_next) + (1 - s) * (s_next**2 - std**2).sqrt()
    torch.testing.assert_close(steps(Kernel("cps", 0.8), GRID).gain[:-1], k.abs() / std, atol=1e-14, rtol=0)


def test_the_dance_kernel_equals_its_form_with_the_score():
    x, v, eta = latents(4, 5), latents(4, 5, seed=1), 0.3
    s, dt = GRID[:-1, None], GRID.diff()[:, None]
    score = -(x - (1 - s) * (x - s * v)) / s**2
    step = steps(Kernel("dance", eta), GRID, 2)
    torch.testing.assert_close(step.mean(x, v), x + v * dt - 0.5 * eta**2 * score * dt, atol=1e-13, rtol=0)
    torch.testing.assert_close(step.std, eta * (-dt).sqrt(), atol=1e-15, rtol=0)


@pytest.mark.parametrize("kernel", KERNELS[:3], ids=NAMES[:3])
def test_kernels_of_an_sde_share_one_form_and_differ_in_their_noise(kernel):
    x, v = latents(4, 5), latents(4, 5, seed=1)
    s, dt = GRID[:-1, None], GRID.diff()[:, None]
    g = {
        "flow": 0.7 * (s / (1 - s.clamp(max=0.75))).sqrt(),
        "dance": torch.full_like(s, 0.3),
        "linear": 0.75 * s,
    }[kernel.name]
    step = steps(kernel, GRID, 2)
    drift = v + g**2 / (2 * s) * (x + (1 - s) * v)  # Flow-GRPO, equation 8
    torch.testing.assert_close(step.mean(x, v), x + drift * dt, atol=1e-13, rtol=0)
    torch.testing.assert_close(step.std, g * (-dt).sqrt(), atol=1e-15, rtol=0)


@pytest.mark.parametrize("eta", [0.0, 0.5, 0.8, 1.0])
def test_cps_keeps_the_coefficients_of_signal_and_noise(eta):
    x_0, noise = latents(4, 5), latents(4, 5, seed=1)
    s, s_next = GRID[:-1, None], GRID[1:, None]
    step = steps(Kernel("cps", eta), GRID, 2)
    mean = step.mean((1 - s) * x_0 + s * noise, noise - x_0)
    kept = mean - (1 - s_next) * x_0  # exactly that much signal, so this is noise alone
    torch.testing.assert_close(kept, s_next * math.cos(eta * math.pi / 2) * noise, atol=1e-14, rtol=0)
    total = (math.cos(eta * math.pi / 2) * s_next) ** 2 + step.std**2
    torch.testing.assert_close(total, s_next**2, atol=1e-15, rtol=0)
    assert step.std[-1] == 0  # at the end there is no noise to draw


def test_cps_without_noise_is_euler():
    x, v = latents(4, 5), latents(4, 5, seed=1)
    step = steps(Kernel("cps", 0), GRID, 2)
    torch.testing.assert_close(step.mean(x, v), x + GRID.diff()[:, None] * v, atol=1e-14, rtol=0)


@pytest.mark.parametrize("kernel", KERNELS, ids=NAMES)
def test_the_log_probability_is_the_mean_log_density_of_a_gaussian(kernel):
    grid = GRID[:-1]
    x, v, x_next = latents(3, 2, 4, 5), latents(3, 2, 4, 5, seed=1), latents(3, 2, 4, 5, seed=2)
    step = steps(kernel, grid, 4)
    mean = step.mean(x, v)
    expected = Normal(mean, step.std.expand_as(mean)).log_prob(x_next).mean(dim=(1, 2, 3))
    torch.testing.assert_close(step.log_prob(x_next, mean), expected, atol=1e-13, rtol=1e-13)


@pytest.mark.parametrize("kernel", KERNELS, ids=NAMES)
def test_the_divergence_of_two_velocities_is_that_of_their_gaussians(kernel):
    grid = GRID[:-1]
    x, v, w = latents(3, 2, 4), latents(3, 2, 4, seed=1), latents(3, 2, 4, seed=2)
    step = steps(kernel, grid, 3)
    std = step.std.expand_as(x)
    expected = kl_divergence(Normal(step.mean(x, v), std), Normal(step.mean(x, w), std)).mean(dim=(1, 2))
    torch.testing.assert_close(step.kl(v, w), expected, atol=1e-12, rtol=1e-12)
    by_gain = 0.5 * step.gain.flatten() ** 2 * ((v - w) ** 2).mean(dim=(1, 2))
    torch.testing.assert_close(step.kl(v, w), by_gain, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("kernel", KERNELS, ids=NAMES)
def test_the_gradient_of_the_log_probability_is_the_drawn_noise_times_the_gain(kernel):
    grid = GRID[:-1]
    x, v, noise = latents(3, 4), latents(3, 4, seed=1).requires_grad_(), latents(3, 4, seed=2)
    step = steps(kernel, grid, 2)
    mean = step.mean(x, v)
    step.log_prob((mean + step.std * noise).detach(), mean).sum().backward()
    # The sign is that of b, which is negative: sampling runs from noise to data.
    torch.testing.assert_close(v.grad, -step.gain * noise / 4, atol=1e-13, rtol=0)


def test_a_grid_that_starts_just_below_one_gets_the_noise_of_one_that_starts_at_one():
    almost = torch.tensor([0.999999, 0.96, 0.5, 0])
    exact = torch.tensor([1, 0.96, 0.5, 0])
    step = Kernel("flow", 0.7).transition(almost[0], almost[1], almost)
    assert float(step.std) == pytest.approx(0.7, abs=1e-4)
    assert float(step.mean(torch.ones(()), torch.ones(()))) == pytest.approx(
        float(Kernel("flow", 0.7).transition(exact[0], exact[1], exact).mean(torch.ones(()), torch.ones(()))), abs=1e-4
    )


@pytest.mark.parametrize("n", [4, 10, 100])
def test_the_first_step_of_flow_has_the_noise_eta_on_any_grid(n):
    grid = torch.linspace(1, 0, n + 1, dtype=torch.float64)
    assert float(steps(Kernel("flow", 0.7), grid).std[0]) == pytest.approx(0.7, abs=1e-12)


@pytest.mark.parametrize("kernel", KERNELS, ids=NAMES)
def test_single_precision_loses_no_more_than_its_rounding(kernel):
    grid = SD35[:-1]
    x, v, x_next = latents(9, 64), latents(9, 64, seed=1), latents(9, 64, seed=2)
    double, single = steps(kernel, grid, 2), steps(kernel, grid.float(), 2)
    for c, d in zip(single, double):
        assert c.dtype == torch.float32
        torch.testing.assert_close(c.double(), d, atol=1e-6, rtol=1e-5)
    mean = double.mean(x, v)
    ours = single.mean(x.float(), v.float())
    torch.testing.assert_close(ours.double(), mean, atol=5e-6, rtol=1e-5)
    ours = single.log_prob((mean + double.std * x_next).float(), ours)
    torch.testing.assert_close(ours.double(), double.log_prob(mean + double.std * x_next, mean), atol=1e-3, rtol=1e-4)


def test_half_precision_inputs_are_computed_in_single_precision():
    x, v = latents(4, 5).bfloat16(), latents(4, 5, seed=1).bfloat16()
    step = steps(KERNELS[0], GRID.float(), 2)
    mean = step.mean(x, v)
    assert mean.dtype == torch.float32
    torch.testing.assert_close(mean, step.mean(x.float(), v.float()), atol=0, rtol=0)


@pytest.mark.parametrize("kernel", KERNELS, ids=NAMES)
def test_samples_with_noise_levels_of_their_own_equal_each_one_alone(kernel):
    x, v = latents(4, 2, 3), latents(4, 2, 3, seed=1)
    together = steps(kernel, GRID, 3)
    for k in range(4):
        alone = kernel.transition(GRID[k], GRID[k + 1], GRID, 3)
        assert torch.equal(together.mean(x, v)[k], alone.mean(x, v)[k])
        assert together.std[k].item() == alone.std.item()


@pytest.mark.parametrize(
    ("name", "eta", "message"),
    [
        ("ddim", 0.7, "kernel is 'ddim'; it must be one of flow, dance, linear, cps"),
        ("flow", -0.1, "eta is -0.1"),
        ("flow", math.nan, "eta is nan"),
        ("flow", math.inf, "eta is inf"),
        ("cps", 1.1, "at most 1 for cps"),
    ],
)
def test_kernels_that_do_not_exist_are_refused(name, eta, message):
    with pytest.raises(ValueError, match=message):
        Kernel(name, eta)
