import json

import numpy as np
import pytest
import torch
from PIL import Image

from lit_diffrl.callbacks import SampleWriter
from tests.callbacks.stand_in import PROMPTS, Counter, loader, media, rollout, trainer


def predict(tmp_path, make, **options):
    run = trainer(tmp_path, SampleWriter(tmp_path / "out", **options))
    run.predict(Counter(make=make), loader(), return_predictions=False)
    return tmp_path / "out"


def test_images_are_written_with_their_prompts_and_a_sheet(tmp_path):
    x = rollout(media(), seeds=torch.arange(5) + 10, metadata=[{"n": i} for i in range(5)])
    x.sample_ids = torch.tensor([4, 3, 7, 1, -1])
    out = predict(tmp_path, lambda m: x, columns=2, tile=64)
    assert sorted(p.name for p in out.iterdir()) == [
        "00001.png", "00003.png", "00004.png", "00007.png", "grid.png", "prompts.jsonl",
    ]  # fmt: skip
    expected = (x.media[2] * 255).round().byte().permute(1, 2, 0).numpy()
    assert np.array_equal(np.asarray(Image.open(out / "00007.png")), expected)
    lines = [json.loads(line) for line in (out / "prompts.jsonl").read_text().splitlines()]
    assert lines[0] == {"n": 3, "file": "00001.png", "prompt": PROMPTS[3], "source": "", "seed": 13}
    assert [line["file"][:5] for line in lines] == ["00001", "00003", "00004", "00007"]
    sheet = np.asarray(Image.open(out / "grid.png"))
    assert sheet.shape[1] == 2 * 74 + 10
    first = np.asarray(Image.open(out / "00001.png").resize((64, 64), Image.Resampling.NEAREST))
    assert any(np.array_equal(sheet[y : y + 64, 10:74], first) for y in range(20, 80))


def test_videos_are_written_as_gif(tmp_path):
    clip = torch.tensor([0.1, 0.2, 0.3]).view(1, 3, 1, 1, 1).expand(2, 3, 3, 8, 8)
    out = predict(tmp_path, lambda m: rollout(clip, fps=4))
    read = Image.open(out / "00001.gif")
    assert read.n_frames == 3 and read.info["duration"] == 250
    assert (out / "grid.png").is_file()


def test_the_sheet_is_limited_and_can_be_left_out(tmp_path):
    assert not (predict(tmp_path, lambda m: rollout(), grid=0) / "grid.png").exists()
    out = predict(tmp_path, lambda m: rollout(), grid=2, columns=8, tile=64)
    assert Image.open(out / "grid.png").size[0] == 2 * 74 + 10


def test_the_default_folder_is_in_the_log_folder(tmp_path):
    trainer(tmp_path, SampleWriter()).predict(Counter(), loader(), return_predictions=False)
    assert (tmp_path / "samples" / "00004.png").is_file()


def test_anything_but_a_rollout_is_refused(tmp_path):
    with pytest.raises(TypeError, match="predict_step returned dict; it must return a Rollout"):
        predict(tmp_path, lambda m: {"sample": media()})
    with pytest.raises(ValueError, match="SampleWriter needs float media"):
        predict(tmp_path, lambda m: rollout((media() * 255).byte()))


def test_samples_out_of_range_are_written_with_one_warning_that_names_the_range(tmp_path, recwarn):
    x = media(value=0.25)
    x[1] = 1.5
    run = trainer(tmp_path, SampleWriter(tmp_path / "out"))
    run.predict(Counter(make=lambda m: rollout(x.clone())), loader(2), return_predictions=False)
    assert np.asarray(Image.open(tmp_path / "out" / "00001.png")).min() == 255
    (said,) = [str(w.message) for w in recwarn if "SampleWriter" in str(w.message)]
    assert "1 of 5 samples leave [0, 1], with values from 1.5 to 1.5" in said


@pytest.mark.distributed
def test_two_ranks_write_one_list_and_one_sheet(tmp_path):
    def make(module):
        x = rollout(media(n=2, value=module.global_rank))
        x.sample_ids = torch.tensor([[0, 2], [1, -1]][module.global_rank])
        return x

    run = trainer(tmp_path, SampleWriter(tmp_path / "out", tile=64), devices=2, strategy="ddp_fork")
    run.predict(Counter(make=make), loader(2), return_predictions=False)
    lines = [json.loads(line)["file"] for line in (tmp_path / "out" / "prompts.jsonl").read_text().splitlines()]
    assert lines == ["00000.png", "00001.png", "00002.png"]
    assert [np.asarray(Image.open(tmp_path / "out" / name)).mean() for name in lines] == [0, 255, 0]
    assert Image.open(tmp_path / "out" / "grid.png").size[0] == 3 * 74 + 10
