"""A user's project: a reward, a reward that is a plain function, and an algorithm, all named in ``my_project.yaml``."""

from typing import Any

import torch
from torch import Tensor

from lit_diffrl import Policy, Rollout
from lit_diffrl.algorithms.matching import MatchingRL, draw_seeds
from lit_diffrl.algorithms.rows import row_mean
from lit_diffrl.callbacks import Reward
from lit_diffrl.sampling.noise import TRAIN_TIME, rand


class Warmth(Reward):
    """How much more red than blue there is in a picture.

    Args:
        threshold: the difference that counts as fully warm.
        kwargs: see :class:`~lit_diffrl.callbacks.Reward`.
    """

    requires = "image"

    def __init__(self, threshold: float = 0.5, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.threshold = threshold

    def score(self, rollout: Rollout) -> Tensor:
        """(B,) at most 1."""
        red, _, blue = rollout.media.mean((2, 3)).unbind(1)
        return ((red - blue) / self.threshold).clamp(max=1)


def short_prompt_bright(rollout: Rollout) -> Tensor:
    """The mean brightness, of pictures of short prompts only: NaN says that a sample is not scored."""
    bright = rollout.media.mean((1, 2, 3))
    short = torch.tensor([len(prompt.split()) < 8 for prompt in rollout.prompts], device=bright.device)
    return bright.where(short, torch.nan)


class RewardWeightedRegression(MatchingRL):
    """Learns its own samples by heart, the better ones more: each counts ``exp(advantage / temperature)``.

    Args:
        policy: the model to train.
        temperature: the advantage that makes a sample count e times as much.
        kwargs: see :class:`~lit_diffrl.DiffusionRL`.
    """

    def __init__(self, policy: Policy, temperature: float = 1.0, **kwargs: Any) -> None:
        super().__init__(policy, **kwargs)
        if temperature <= 0:
            raise ValueError(f"model.temperature is {temperature}; it must be above 0")
        self.temperature = temperature

    def loss(self, batch: Rollout) -> tuple[Tensor, dict[str, Tensor]]:
        """The weighted flow-matching loss of each row, (N,), and what to log of it."""
        noised = self.renoise(batch, rand(draw_seeds(batch), TRAIN_TIME))
        velocity = self.velocity(noised.latents, noised.timestep, batch.prompts)
        error = row_mean((velocity - noised.target) ** 2)
        weight = (batch.advantages / self.temperature).exp()
        return weight * error, {"error": error, "weight_max": weight}
