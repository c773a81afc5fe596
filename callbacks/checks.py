"""What media must look like before anyone scores or shows it."""

from typing import Literal

from torch import Tensor

from lit_diffrl.rollouts import Rollout

MediaKind = Literal["image", "video", "any"]
_AXES = {4: "images (B, C, H, W)", 5: "videos (B, T, C, H, W)"}
_DIMS: dict[MediaKind, tuple[int, ...]] = {"image": (4,), "video": (5,), "any": (4, 5)}
_SLACK = 0.01


def check_media(rollout: Rollout, requires: MediaKind, who: str) -> Tensor:
    """Check the media of a rollout.

    A batch in the wrong form is a mistake of whoever made it and raises. A sample that is not finite, or not in the
    range, is bad luck of a model and only reported; where none of the finite ones is, it is the form that is wrong.

    Args:
        rollout: whose ``media`` is looked at: images (B, C, H, W) or videos (B, T, C, H, W) with one or three channels,
            float in [0, 1].
        requires: the kind of media that is wanted.
        who: for whom, as it shall stand in the error.

    Returns:
        (B,) bool on the media's device: which samples are finite and in [0, 1], with 0.01 for rounding.

    Raises:
        ValueError: if there are no media, or of the wrong kind, axes or dtype, or if no finite sample is in [0, 1].
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
    low, high = _ranges(media)
    finite = low.isfinite() & high.isfinite()
    usable = finite & (low >= -_SLACK) & (high <= 1 + _SLACK)
    if finite.any() and not usable.any():
        raise _out_of_range(low[finite].min().item(), high[finite].max().item(), who)
    return usable


def flaws(media: Tensor, usable: Tensor) -> str:
    """What is wrong with the samples that :func:`check_media` does not find usable, of which there is at least one.

    Args:
        media: (B, ...).
        usable: (B,) bool, what :func:`check_media` gave.
    """
    low, high = _ranges(media)
    finite = low.isfinite() & high.isfinite()
    outside = finite & ~usable.to(media.device)
    words = []
    if broken := int((~finite).sum()):
        words.append(f"{broken} of {len(media)} samples are not finite")
    if outside.any():
        span = f"from {low[outside].min().item():.3g} to {high[outside].max().item():.3g}"
        words.append(f"{int(outside.sum())} of {len(media)} samples leave [0, 1], with values {span}")
    return " and ".join(words)


def _out_of_range(low: float, high: float, who: str) -> ValueError:
    if low >= -_SLACK and high > 2:
        hint = "it looks like 0..255: divide by 255"
    elif -1 - _SLACK <= low < 0 and high <= 1 + _SLACK:
        hint = "it looks like [-1, 1]: use media / 2 + 0.5"
    else:
        hint = "rescale it"
    return ValueError(f"{who} needs media in [0, 1], got values from {low:.3g} to {high:.3g}: {hint}")


def _ranges(media: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the greatest value of each sample, (B,) float32; not both finite where any value is not."""
    values = media.detach().flatten(1)
    return values.amin(1).float(), values.amax(1).float()
