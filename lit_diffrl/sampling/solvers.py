"""The sampling loop: deterministic solvers of the flow, with stochastic steps where an algorithm asks for them."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lit_diffrl.sampling.kernels import Kernel, Transition, deterministic
from lit_diffrl.sampling.schedule import Schedule

SolverName = Literal["euler", "dpm2"]
Velocity = Callable[[Tensor, Tensor], Tensor]


class Step(NamedTuple):
    """What one step of the loop did, for a batch of B samples."""

    number: int
    latents: Tensor  # (B, ...) where it started
    velocity: Tensor  # (B, ...) float32
    transition: Transition
    next_latents: Tensor  # (B, ...) where it ended
    stochastic: Tensor  # (B,) bool


def sample(
    velocity: Velocity,
    latents: Tensor,
    schedule: Schedule,
    *,
    solver: SolverName = "euler",
    kernel: Kernel | None = None,
    stochastic: Tensor | None = None,
    noise: Callable[[int], Tensor] | None = None,
    on_step: Callable[[Step], None] | None = None,
) -> Tensor:
    """Carry noise to data along the flow.

    Args:
        velocity: the network, of latents (B, ...) and timesteps (B,) in [0, 1000].
        latents: (B, ...) float32 noise.
        schedule: the grid.
        solver: ``euler``, or ``dpm2``, the second-order multistep solver DPM-Solver++(2M) in x0-prediction, which a
            grid with stochastic steps cannot use, since the noise breaks its history.
        kernel: how stochastic steps draw their noise.
        stochastic: (B, T) bool, which steps of which samples are stochastic; none where omitted.
        noise: standard normal draws (B, ...) of a step index; called for steps with a stochastic sample only.
        on_step: is shown every step, as the samplers of k-diffusion do with their callback.

    Returns:
        (B, ...) float32 latents at noise level 0.

    Raises:
        ValueError: for ``dpm2`` with stochastic steps, or a stochastic last step, whose result would keep its noise.
    """
    if stochastic is None:
        stochastic = torch.zeros(len(latents), schedule.num_steps, dtype=torch.bool)
    if bool(stochastic.any()):
        if solver != "euler":
            raise ValueError(
                f"solver {solver!r} cannot take stochastic steps: use 'euler' or make every step deterministic"
            )
        if bool(stochastic[:, -1].any()):
            raise ValueError("the last step must be deterministic: its noise would stay in the sample")
        if kernel is None or noise is None:
            raise ValueError("stochastic steps need a kernel and noise")
    sigmas = schedule.sigmas.to(latents.device)
    x, history = latents, _History()
    for k in range(schedule.num_steps):
        sigma, sigma_next = sigmas[k], sigmas[k + 1]
        v = velocity(x, schedule.timesteps[k].to(x.device).expand(len(x))).float()
        transition, mask = deterministic(sigma, sigma_next), stochastic[:, k]
        if bool(mask.any()) and kernel is not None and noise is not None:
            transition = _where(mask.to(x.device), kernel.transition(sigma, sigma_next, sigmas), transition, x.ndim)
            x_next = transition.mean(x, v) + transition.std * noise(k).to(x.device)
        else:
            x_next = transition.mean(x, v)
            if solver == "dpm2":
                x_next = x_next + history.correction(x - sigma * v, float(sigma), float(sigma_next))
        if on_step is not None:
            on_step(Step(k, x, v, transition, x_next, mask))
        x = x_next
    return x


def _where(mask: Tensor, yes: Transition, no: Transition, ndim: int) -> Transition:
    """Per-sample choice between two transitions with scalar coefficients."""
    column = mask.reshape(-1, *[1] * (ndim - 1))
    return Transition(*(torch.where(column, y, n) for y, n in zip(yes, no)))


class _History:
    """The memory of DPM-Solver++(2M): what it adds to an Euler step, which is its own first-order step."""

    def __init__(self) -> None:
        self.x0: Tensor | None = None
        self.lam = 0.0

    def correction(self, x0: Tensor, sigma: float, sigma_next: float) -> Tensor:
        """``-1/2 (1 - s') (e^-h - 1) (h / h_0) (x0 - x0_previous)``; none on the first and on the last step."""
        lam = _log_snr(sigma)
        if self.x0 is None or sigma_next == 0:
            correction = torch.zeros_like(x0)
        else:
            h, h_0 = _log_snr(sigma_next) - lam, lam - self.lam
            ratio = h / h_0  # 0 where the previous level was pure noise, whose log-SNR is -inf
            correction = -0.5 * (1 - sigma_next) * torch.expm1(torch.tensor(-h)).item() * ratio * (x0 - self.x0)
        self.x0, self.lam = x0, lam
        return correction


def _log_snr(sigma: float) -> float:
    """``log((1 - s) / s)`` in double precision, -inf for pure noise."""
    return torch.logit(torch.tensor(1 - sigma, dtype=torch.float64)).item()
