"""Pictures and clips from tensors: PIL images, GIF and MP4."""

import io
from collections.abc import Sequence
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor
from torchvision.transforms.functional import to_pil_image

DEFAULT_FPS = 8.0


def to_pil(picture: Tensor) -> Image.Image:
    """A picture (C, H, W), float in [0, 1], C = 1 or 3, as 8-bit PIL image, rounded to the nearest level."""
    return to_pil_image((picture.detach().float().clamp(0, 1) * 255).round().byte().cpu())


def gif(frames: Sequence[Image.Image], fps: float) -> bytes:
    """An endless animated GIF; its clock ticks in hundredths of a second, to which the frame time is rounded."""
    out = io.BytesIO()
    duration = max(round(100 / fps), 1) * 10
    frames[0].save(out, "GIF", save_all=True, append_images=frames[1:], duration=duration, loop=0)
    return out.getvalue()


def write_clip(frames: Sequence[Image.Image], fps: float, stem: Path) -> Path:
    """Write a clip as MP4 (H.264) where PyAV is installed, else as GIF.

    Args:
        frames: of equal size. An odd height or width, which H.264 refuses, is padded by a pixel.
        fps: frames a second.
        stem: path without its suffix.

    Returns:
        The path written.
    """
    if find_spec("av") is None:
        path = stem.with_suffix(".gif")
        path.write_bytes(gif(frames, fps))
        return path
    import av

    path = stem.with_suffix(".mp4")
    width, height = (side + side % 2 for side in frames[0].size)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1001))
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for frame in frames:
            array = np.asarray(frame.convert("RGB"))
            padded = np.pad(array, ((0, height - array.shape[0]), (0, width - array.shape[1]), (0, 0)), "edge")
            container.mux(stream.encode(av.VideoFrame.from_ndarray(padded, format="rgb24")))
        container.mux(stream.encode())
    return path
