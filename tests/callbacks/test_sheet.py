import io

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont

from lit_diffrl.callbacks import SampleLogger, encode
from lit_diffrl.callbacks.encode import gif, to_pil, write_clip
from lit_diffrl.callbacks.sheet import contact_sheet, fit, wrap


def constant_frames(*values, side=8):
    return [to_pil(torch.full((3, side, side), v)) for v in values]


def test_pictures_are_rounded_to_the_nearest_level():
    picture = torch.tensor([0.0, 0.4 / 255, 0.6 / 255, 254.5001 / 255, 1.0, 1.009]).view(1, 1, 6)
    assert np.asarray(to_pil(picture)).ravel().tolist() == [0, 0, 1, 255, 255, 255]


def test_a_gif_keeps_its_frames_in_order():
    read = Image.open(io.BytesIO(gif(constant_frames(0.1, 0.2, 0.3), fps=4)))
    means = []
    for i in range(read.n_frames):
        read.seek(i)
        means.append(np.asarray(read.convert("RGB")).mean() / 255)
    assert means == pytest.approx([0.1, 0.2, 0.3], abs=0.01)
    assert read.info["duration"] == 250


def test_an_mp4_keeps_its_frames_in_order(tmp_path):
    av = pytest.importorskip("av")
    path = write_clip(constant_frames(0.1, 0.5, 0.9, side=31), 8.0, tmp_path / "clip")
    assert path == tmp_path / "clip.mp4"
    with av.open(str(path)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        assert float(container.streams.video[0].average_rate) == 8.0
    assert frames[0].shape == (32, 32, 3)
    assert [f.mean() / 255 for f in frames] == pytest.approx([0.1, 0.5, 0.9], abs=0.02)


def test_without_pyav_a_gif_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(encode, "find_spec", lambda name: None)
    path = write_clip(constant_frames(0.1, 0.2), 8.0, tmp_path / "clip")
    assert path.suffix == ".gif" and path.read_bytes().startswith(b"GIF89a")


@pytest.mark.parametrize("text", ["a red fox in the snow " * 5, "x" * 200, "", "one\ntwo words"])
def test_wrapped_lines_fit_and_lose_nothing(text):
    font = ImageFont.load_default(13)
    lines = wrap(text, 100, font)
    assert all(font.getlength(line) <= 100 for line in lines)
    assert "".join("".join(lines).split()) == "".join(text.split())


def test_small_pictures_grow_by_whole_factors_and_large_ones_shrink():
    picture = to_pil(torch.rand(3, 30, 20, generator=torch.Generator().manual_seed(0)))
    grown = fit(picture, 100)
    assert grown.size == (60, 90)
    assert np.array_equal(np.asarray(grown), np.asarray(picture).repeat(3, 0).repeat(3, 1))
    assert fit(Image.new("RGB", (512, 256)), 128).size == (128, 64)


def test_a_sheet_shows_every_picture_in_its_place():
    values = [0.1, 0.3, 0.5, 0.7, 0.9]
    sheet = contact_sheet(constant_frames(*values, side=32), list("abcde"), "headline", columns=3, side=64)
    tile, gap, line = 64, 10, 17
    top, row = gap + line + gap, tile + line + gap + line // 3
    assert sheet.size == (3 * (tile + gap) + gap, top + 2 * row)
    array = np.asarray(sheet)
    for i, value in enumerate(values):
        x, y = gap + i % 3 * (tile + gap), top + i // 3 * row
        assert (array[y : y + tile, x : x + tile] == round(value * 255)).all()
        caption = array[y + tile : y + row - 2, x : x + tile]
        assert caption.min() < 100  # there is ink
    assert (array[:, -gap:] == 228).all()


def test_a_long_prompt_ends_within_its_tile_and_the_scores_stay(monkeypatch):
    drawn = []
    text = ImageDraw.ImageDraw.text
    monkeypatch.setattr(ImageDraw.ImageDraw, "text", lambda self, xy, s, *a: drawn.append(s) or text(self, xy, s, *a))
    contact_sheet(constant_frames(0.5), ["a very long prompt " * 20 + "\nocr 0.5\nclip 1"], "", side=64)
    assert drawn[3].endswith("…") and drawn[4:] == ["ocr 0.5", "clip 1"]
    assert all(ImageFont.load_default(13).getlength(line) <= 64 for line in drawn)


def test_a_font_is_read_at_once(tmp_path):
    (tmp_path / "a.ttf").write_text("no font")
    for path in (tmp_path / "a.ttf", tmp_path / "missing.ttf"):
        with pytest.raises(ValueError, match=r"font is .*ttf; it must be a TrueType"):
            SampleLogger(font=path)
