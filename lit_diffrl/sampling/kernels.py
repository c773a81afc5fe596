r"""Stochastic steps of a flow: Gaussian transitions with the marginals (nearly) of the deterministic flow.

Conventions: ``x_s = (1 - s) x_0 + s eps`` with the noise level ``s`` (sigma) from 1 (noise) to 0 (data), velocity
``v = eps - x_0``, and a step goes from ``s`` to ``s' < s`` with ``dt = s' - s < 0``. Every kernel is affine in both the
latents and the velocity,

    x' = a x + b v + std z,      z ~ N(0, I),

so one set of formulas serves them all: the log-probability, the KL divergence ``1/2 gain^2 |dv|^2`` and the gain
``|b| / std`` by which a change of velocity moves the log-probability.

| kernel | noise | source |
|---|---|---|
| ``flow`` | ``g = eta sqrt(s / (1 - s))`` | Flow-GRPO, arXiv 2505.05470, equations 8 and 9 |
| ``dance`` | ``g = eta`` | DanceGRPO, arXiv 2505.07818 |
| ``linear`` | ``g = eta (s_T + (s_1 - s_T) s)`` | the Wan variant of Flow-GRPO and of Flash-GRPO |
| ``cps`` | ``std = s' sin(eta pi / 2)`` | coefficient-preserving sampling, arXiv 2509.05952 |

The first three are Euler-Maruyama steps of the SDE with diffusion ``g``; ``cps`` keeps the total noise level instead.
All arithmetic is in float32 or higher, whatever the precision of the network.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

KernelName = Literal["flow", "dance", "linear", "cps"]


class Transition(NamedTuple):
    """Coefficients of one Gaussian step, each broadcastable to the latents: ``x' ~ N(a x + b v, std^2)``."""

    a: Tensor
    b: Tensor
    std: Tensor

    def mean(self, latents: Tensor, velocity: Tensor) -> Tensor:
        """The mean of the next latents, (B, ...) float32 or higher."""
        return self.a * _full(latents) + self.b * _full(velocity)

    def log_prob(self, next_latents: Tensor, mean: Tensor) -> Tensor:
        """The log-density of ``next_latents``, averaged over the elements of a sample: (B,).

        The mean, not the sum, as in all released code of the family: the ratio of two policies is then the true one to
        the power 1/D, which is why clip ranges are as small as 1e-4. The normaliser is kept.

        Raises:
            ValueError: if the step is deterministic (``std`` 0), whose log-density does not exist.
        """
        if bool((self.std == 0).any()):
            raise ValueError(
                "a deterministic step (std 0) has no log-probability: only stochastic steps can be trained on"
            )
        log_density = -((next_latents - mean) ** 2) / (2 * self.std**2) - self.std.log() - 0.5 * math.log(2 * math.pi)
        return _mean(log_density)

    def kl(self, velocity: Tensor, other: Tensor) -> Tensor:
        """KL divergence between the steps that two velocities take from one point, mean over elements: (B,).

        Equals ``1/2 gain^2 mean |v - v'|^2`` (Flow-GRPO, the KL of its section 4, with the step length it needs).
        """
        return 0.5 * _mean((self.gain * (_full(velocity) - _full(other))) ** 2)

    @property
    def gain(self) -> Tensor:
        """``|b| / std``: how strongly the velocity moves the log-probability (lambda of Flash-GRPO)."""
        return self.b.abs() / self.std


@dataclass(frozen=True)
class Kernel:
    """A kind of stochastic step and its level of noise.

    Args:
        name: ``flow``, ``dance``, ``linear`` or ``cps``.
        eta: noise level; 0 makes every step deterministic. For ``cps`` at most 1.
    """

    name: KernelName = "flow"
    eta: float = 0.7

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.name not in ("flow", "dance", "linear", "cps"):
            raise ValueError(f"kernel is {self.name!r}; it must be one of flow, dance, linear, cps")
        if not (math.isfinite(self.eta) and self.eta >= 0) or (self.name == "cps" and self.eta > 1):
            raise ValueError(f"eta is {self.eta}; it must be at least 0, and at most 1 for cps")

    def transition(self, sigma: Tensor, sigma_next: Tensor, sigmas: Tensor, ndim: int = 1) -> Transition:
        """Coefficients of the step from ``sigma`` to ``sigma_next``.

        Args:
            sigma: (B,) or scalar, in (0, 1].
            sigma_next: the same shape, in [0, sigma).
            sigmas: (T+1,) the whole grid: its second value bounds the noise of the first step, where
                ``s / (1 - s)`` diverges.
            ndim: dimensions of the latents, to which the coefficients are shaped as (B, 1, ..., 1).

        Returns:
            A transition whose ``mean`` and ``log_prob`` take (B, ...) tensors.
        """
        s, s_next, sigmas = _full(sigma), _full(sigma_next), _full(sigmas)
        if self.name == "cps":
            std, keep = s_next * math.sin(self.eta * math.pi / 2), math.cos(self.eta * math.pi / 2)
            a, b = (1 - s_next) + s_next * keep, -s * (1 - s_next) + (1 - s) * s_next * keep
        else:
            g, dt = self._diffusion(s, sigmas), s_next - s
            a, b, std = 1 + g**2 / (2 * s) * dt, (1 + g**2 * (1 - s) / (2 * s)) * dt, g * (-dt).sqrt()
        return Transition(*(_column(c, ndim) for c in (a, b, std)))

    def _diffusion(self, s: Tensor, sigmas: Tensor) -> Tensor:
        """The coefficient g of the SDE's noise at level ``s``."""
        if self.name == "flow":
            # min(), not a test for s == 1: grids that start at 0.999999 would get a thousandfold noise.
            return self.eta * (s / (1 - s.minimum(sigmas[1]))).sqrt()
        if self.name == "dance":
            return torch.full_like(s, self.eta)
        return self.eta * (sigmas[-1] + (sigmas[1] - sigmas[-1]) * s)


def deterministic(sigma: Tensor, sigma_next: Tensor, ndim: int = 1) -> Transition:
    """The Euler step of the flow as a transition without noise: ``x' = x + (s' - s) v``."""
    s, s_next = _full(sigma), _full(sigma_next)
    return Transition(*(_column(c, ndim) for c in (torch.ones_like(s), s_next - s, torch.zeros_like(s))))


def _full(x: Tensor) -> Tensor:
    """At least float32."""
    return x if x.dtype == torch.float64 else x.float()


def _column(x: Tensor, ndim: int) -> Tensor:
    """(B,) as (B, 1, ..., 1) with ``ndim`` dimensions; scalars stay."""
    return x.reshape(-1, *[1] * (ndim - 1)) if x.ndim else x


def _mean(x: Tensor) -> Tensor:
    """Mean over all but the first dimension."""
    return x.flatten(1).mean(1) if x.ndim > 1 else x
