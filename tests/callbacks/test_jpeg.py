import io

import numpy as np
import pytest
import torch
from PIL import Image

from lit_diffrl.callbacks import JPEGCompressibility, JPEGIncompressibility
from tests.callbacks.stand_in import Counter, media, rollout, trainer


def run(reward, x):
    reward.on_rollout_batch_end(trainer(".", reward), Counter(), x)
    return x.rewards[reward.name]


def pil_kilobytes(picture, quality):
    array = np.round(picture.permute(1, 2, 0).numpy().astype(np.float64) * 255).astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(array).save(out, format="JPEG", quality=quality)
    return len(out.getvalue()) / 1000


@pytest.mark.parametrize("quality", [95, 40])
def test_it_is_the_size_of_pillows_file(quality):
    x = rollout(media(side=32))
    expected = torch.tensor([pil_kilobytes(p, quality) for p in x.media])
    assert torch.equal(run(JPEGIncompressibility(quality=quality), x), expected)
    assert torch.equal(run(JPEGCompressibility(quality=quality), x), -expected)


def test_flat_is_smaller_than_smooth_than_texture_than_noise():
    ramp = torch.linspace(0, 1, 64)
    smooth = (ramp[:, None] * ramp).expand(3, 64, 64)
    stripes = (torch.arange(64) % 2).float().expand(3, 64, 64) * ramp[:, None]
    x = rollout(torch.stack([torch.full((3, 64, 64), 0.5), smooth, stripes, media(n=1, side=64)[0]]))
    scores = run(JPEGCompressibility(), x)
    assert (scores.diff() < 0).all()


def test_a_video_scores_the_mean_of_its_frames():
    x = rollout(media("video", n=2, side=16))
    expected = [np.mean([pil_kilobytes(frame, 95) for frame in clip]) for clip in x.media]
    torch.testing.assert_close(run(JPEGIncompressibility(), x), torch.tensor(expected, dtype=torch.float32))


def test_quality_is_checked():
    with pytest.raises(ValueError, match="quality of the reward jpeg_compressibility is 100; it must be from 1 to 95"):
        JPEGCompressibility(quality=100)
