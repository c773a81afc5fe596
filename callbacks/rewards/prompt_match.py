"""Whether a picture of the shapes world shows what its prompt asks for."""

from functools import lru_cache
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from lit_diffrl.callbacks.checks import MediaKind
from lit_diffrl.callbacks.rewards import composition
from lit_diffrl.callbacks.rewards.base import Reward
from lit_diffrl.rollouts import Rollout

Mode = Literal["soft", "strict", "mean", "count", "color_shape", "position"]


class PromptMatch(Reward):
    """Objects, colours, shapes, their number and their relation, checked against the prompt by a fixed detector.

    It reads the prompts of the embedded model ``shapes``, such as ``two red squares on black``; a prompt that it cannot
    read is not scored. Beside the score it notes ``strict``, ``soft``, ``count``, ``color``, ``shape``, ``position``
    and ``background``, all in [0, 1] and without weight.

    Args:
        mode: ``soft`` gives credit for each part that is right, ``strict`` is 1 only if everything is right, ``mean``
            is the mean of both. One part alone: ``count`` is 1 if the number of objects is right, ``color_shape`` the
            mean share of the objects with the right colour and with the right shape, and ``position`` is 1 if the
            relation holds, for prompts that have one.
        kwargs: see :class:`~lit_diffrl.callbacks.rewards.Reward`.
    """

    requires: ClassVar[MediaKind] = "image"
    parts: ClassVar[tuple[str, ...]] = ("strict", "soft", "count", "color", "shape", "position", "background")

    def __init__(self, mode: Mode = "soft", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if mode not in get_args(Mode):
            known = ", ".join(get_args(Mode))
            raise ValueError(f"mode of the reward {self.name} is {mode!r}; it must be one of {known}")
        self.mode = mode

    def score(self, rollout: Rollout) -> Tensor:
        """(B,) in [0, 1]."""
        found = composition.score(rollout.media, [_parse(prompt) for prompt in rollout.prompts])
        rollout.rewards.update({part: found[part] for part in self.parts})
        pairs = {"mean": ("strict", "soft"), "color_shape": ("color", "shape")}
        if self.mode in pairs:
            return torch.stack([found[part] for part in pairs[self.mode]]).mean(0)
        return found[self.mode]


_parse = lru_cache(maxsize=4096)(composition.parse)
