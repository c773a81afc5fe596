"""What media must look like before anyone scores or shows it."""

from typing import Literal

import torch
from torch import Tensor

from lit_diffrl.rollouts import Rollout

MediaKind = Literal["image", "video", "any"]
_AXES = {4: "images (B, C, H, W)", 5: "videos (B, T, C, H, W)"}
_DIMS: dict[MediaKind, tuple[int, ...]] = {"image": (4,), "video": (5,), "any": (4, 5)}
_SLACK = 0.01


def check_media(rollout: Rollout, requires: MediaKind, who: str) -> Tensor:
    """Check the media of a rollout.

    A batch in the wrong form is a mistake of whoever made it and raises. A sample that is not finite is bad luck of a
    model, and is only reported.

    Args:
        rollout: whose ``media`` is looked at: images (B, C, H, W) or videos (B, T, C, H, W) with one or three channels,
            float in [0, 1].
        requires: the kind of media that is wanted.
        who: for whom, as it shall stand in the error.

    Returns:
        (B,) bool on the media's device: which samples are finite.

    Raises:
        ValueError: if there are no media, or of the wrong kind, axes, dtype or range (by more than 0.01).
    """
    if "media" not in rollout:
        raise ValueError(f"{who} needs media, but the rollout has none: the algorithm must decode before it scores")
    media = rollout.media
    if media.ndim not in _DIMS[requires] or len(media) != len(rollout):
        wanted = " or ".join(_AXES[d] for d in _DIMS[requires])
        raise ValueError(f"{who} needs {wanted} with B = {len(rollout)}, got media of shape {tuple(media.shape)}")
    if media.shape[-3] not in (1, 3):
        last = media.shape[-1] in (1, 3)
        hint = (
            "the channels stand last: permute them"
            if last
            else "the channels (1 or 3) must be the third axis from last"
        )
        raise ValueError(f"{who} needs {_AXES[media.ndim]}, got media of shape {tuple(media.shape)}: {hint}")
    if not media.is_floating_point():
        raise ValueError(f"{who} needs float media in [0, 1], got {media.dtype}: divide by 255")
    finite = media.isfinite().flatten(1).all(1)
    low, high = _range(media[finite])
    if low < -_SLACK or high > 1 + _SLACK:
        hint = (
            "it looks like [-1, 1]: use media / 2 + 0.5"
            if -1 - _SLACK <= low < 0 and high <= 1 + _SLACK
            else "rescale it"
        )
        raise ValueError(f"{who} needs media in [0, 1], got values from {low:.3g} to {high:.3g}: {hint}")
    return finite


def _range(x: Tensor) -> tuple[float, float]:
    if x.numel() == 0:
        return 0.0, 0.0
    low, high = torch.aminmax(x)
    return low.item(), high.item()
