r"""MixGRPO (arXiv 2507.21802): Flow-GRPO in a window of stochastic steps that moves from noise to data.

Steps outside the window are deterministic. The window begins at the noisy end and moves on by ``stride`` every
``shift_every`` rounds. The loss is that of Flow-GRPO.
"""

from __future__ import annotations

from typing import Any

from lit_diffrl.algorithms.flow_grpo import FlowGRPO
from lit_diffrl.policies.base import Policy


class MixGRPO(FlowGRPO):
    """Flow-GRPO in a moving window.

    Args:
        policy: the model to train.
        window: w, number of consecutive steps that are stochastic and trained on.
        shift_every: tau, rounds after which the window moves.
        stride: s, steps by which it moves.
        wrap: begin again at the noisy end after the last place, instead of staying there.
        shared_noise: start all samples of a group from the same noise.
        kwargs: see :class:`~lit_diffrl.algorithms.flow_grpo.FlowGRPO`; the window moves within ``window_range``.
    """

    def __init__(
        self,
        policy: Policy,
        window: int = 4,
        shift_every: int = 25,
        stride: int = 1,
        wrap: bool = False,
        shared_noise: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(policy, window=window, shared_noise=shared_noise, **kwargs)
        if shift_every < 1 or stride < 1:
            raise ValueError(
                f"model.shift_every is {shift_every} and model.stride is {stride}; both must be at least 1"
            )
        self.shift_every = shift_every
        self.stride = stride
        self.wrap = wrap

    def window_start(self, round_: int) -> int:
        """The first stochastic step of a round, equal on all ranks."""
        lo, hi = self.window_range
        last = hi - lo - self.window
        shifts = round_ // self.shift_every
        if self.wrap:
            shifts %= last // self.stride + 1
        return lo + min(shifts * self.stride, last)

    def mean_inverse_gain(self) -> float:
        """Mean of 1/lambda over the window of the round: over all its places, the weights would fall as it moves."""
        start = self.window_start(self.loader.round)
        return self.inverse_gains()[start : start + self.window].mean().item()
