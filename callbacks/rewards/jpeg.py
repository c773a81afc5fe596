"""How small a picture becomes as JPEG: the toy rewards of DDPO (Black et al. 2023, arXiv:2305.13301)."""

import io
from typing import Any

import torch
from torch import Tensor

from lit_diffrl.callbacks.encode import to_pil
from lit_diffrl.callbacks.rewards.base import Reward
from lit_diffrl.rollouts import Rollout


def jpeg_kilobytes(picture: Tensor, quality: int) -> float:
    """Size of a picture (C, H, W), float in [0, 1], as Pillow's JPEG, in units of 1000 bytes."""
    out = io.BytesIO()
    to_pil(picture).save(out, "JPEG", quality=quality)
    return out.tell() / 1000


class JPEGIncompressibility(Reward):
    """The size of the picture as JPEG, in kilobytes: textures and noise score high. Of videos, the frames' mean.

    Args:
        quality: of the JPEG, 1 to 95.
        kwargs: see :class:`~lit_diffrl.callbacks.rewards.Reward`.
    """

    sign = 1.0

    def __init__(self, quality: int = 95, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if not 1 <= quality <= 95:
            raise ValueError(f"quality of the reward {self.name} is {quality}; it must be from 1 to 95")
        self.quality = quality

    def score(self, rollout: Rollout) -> Tensor:
        """Kilobytes, with the sign of the class."""
        sizes = [self._mean_size(media if media.ndim == 4 else media[None]) for media in rollout.media]
        return self.sign * torch.tensor(sizes, dtype=torch.float32)

    def _mean_size(self, frames: Tensor) -> float:
        return sum(jpeg_kilobytes(frame, self.quality) for frame in frames) / len(frames)


class JPEGCompressibility(JPEGIncompressibility):
    """Minus the size of the picture as JPEG, in kilobytes: plain surfaces score high. Of videos, the frames' mean.

    Args:
        quality: of the JPEG, 1 to 95.
        kwargs: see :class:`~lit_diffrl.callbacks.rewards.Reward`.
    """

    sign = -1.0
