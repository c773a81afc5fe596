import io
import pickle

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lit_diffrl.callbacks import EMA, SampleLogger, as_reward
from lit_diffrl.callbacks import media as media_module
from tests.callbacks.stand_in import PROMPTS, Counter, loader, media, rollout, trainer

BRIGHT = as_reward("bright", lambda r: r.media.flatten(1).mean(1))


def fit(tmp_path, *callbacks, module=None, epochs=2, **options):
    logger = TensorBoardLogger(tmp_path, "tb", version=0)
    options = {"max_epochs": epochs, "num_sanity_val_steps": -1, "log_every_n_steps": 1, **options}
    run = trainer(tmp_path, *callbacks, logger=logger, **options)
    run.fit(module or Counter(), loader(3), loader())
    return EventAccumulator(
        logger.log_dir, size_guidance={"images": 0}
    ).Reload(), tmp_path / "tb" / "version_0" / "images"


@pytest.fixture
def sheets(monkeypatch):
    """What the sheets are drawn of: (pictures, captions, headline)."""
    calls = []
    draw = media_module.contact_sheet
    monkeypatch.setattr(media_module, "contact_sheet", lambda *a: calls.append(a) or draw(*a))
    return calls


def test_every_validation_makes_a_sheet_in_tensorboard_and_on_disk(tmp_path):
    events, folder = fit(tmp_path, BRIGHT, SampleLogger(columns=3, tile=64))
    assert [e.step for e in events.Images("val/samples")] == [0, 3, 6]
    assert sorted(p.name for p in folder.iterdir()) == [f"val_update{n:06d}.png" for n in (0, 3, 6)]
    file = Image.open(folder / "val_update000003.png")
    logged = Image.open(io.BytesIO(events.Images("val/samples")[1].encoded_image_string))
    assert file.size[0] == 3 * 74 + 10
    assert np.array_equal(np.asarray(file), np.asarray(logged))


def test_captions_and_headline_say_what_is_shown(tmp_path, sheets):
    # The logger comes before the reward, which then fills in its scores later.
    fit(
        tmp_path,
        SampleLogger(),
        BRIGHT,
        EMA(0.9, start_step=3),
        module=Counter(make=lambda m: rollout(media(value=0.25))),
    )
    assert [s[2] for s in sheets] == [
        "before training: euler, 10 steps, guidance 1, live weights",
        "round 1 of 2, update 3: euler, 10 steps, guidance 1, averaged weights (EMA 0.9)",
        "round 2 of 2, update 6: euler, 10 steps, guidance 1, averaged weights (EMA 0.9)",
    ]
    assert sheets[0][1] == [f"{prompt}\nbright 0.25" for prompt in PROMPTS]


def test_the_pictures_are_those_of_this_validation(tmp_path, sheets):
    make = lambda m: rollout(media(value=m.weight.item() / 10), sample_ids=torch.tensor([0, 1, 2, 3, -1]))  # noqa: E731
    fit(tmp_path, BRIGHT, SampleLogger(num_samples=7), module=Counter(make=make), limit_val_batches=1)
    assert [np.asarray(s[0][0]).mean() for s in sheets] == [0, 76, 153]
    assert {len(s[0]) for s in sheets} == {4}  # the padding is left out


def test_it_shows_num_samples_every_n_validations(tmp_path, sheets):
    fit(tmp_path, BRIGHT, SampleLogger(num_samples=2, every_n_validations=2), epochs=3)
    assert [(len(s[0]), s[2][:7]) for s in sheets] == [(2, "before "), (2, "round 2")]


def test_videos_are_animated_in_tensorboard_and_a_clip_on_disk(tmp_path):
    pytest.importorskip("av")
    clip = torch.tensor([0.1, 0.2, 0.3]).view(1, 3, 1, 1, 1).expand(2, 3, 3, 8, 8)
    module = Counter("video", make=lambda m: rollout(clip, fps=4))
    events, folder = fit(tmp_path, BRIGHT, SampleLogger(), module=module, epochs=1)
    data = events.Images("val/samples")[0].encoded_image_string
    assert data.startswith(b"GIF89a")
    read, means = Image.open(io.BytesIO(data)), []
    for i in range(read.n_frames):
        read.seek(i)
        means.append(np.asarray(read.convert("RGB"))[90:200, 20:250].mean() / 255)
    assert means == pytest.approx([0.1, 0.2, 0.3], abs=0.01)
    assert sorted(p.name for p in folder.iterdir()) == ["val_update000000.mp4", "val_update000003.mp4"]


def test_media_out_of_range_are_refused(tmp_path):
    module = Counter(make=lambda m: rollout(media() * 2 - 1, rewards={"x": torch.zeros(5)}))
    with pytest.raises(ValueError, match=r"SampleLogger needs media in \[0, 1\].*it looks like \[-1, 1\]"):
        fit(tmp_path, SampleLogger(), module=module)


def test_one_sample_out_of_range_is_shown_among_the_others(tmp_path, sheets):
    x = media(value=0.25)
    x[1, :, :4], x[2] = -0.5, torch.nan
    trainer(tmp_path, SampleLogger()).validate(Counter(make=lambda m: rollout(x.clone())), loader(), verbose=False)
    pictures = [np.asarray(picture) for picture in sheets[0][0]]
    assert [p[0, 0, 0] for p in pictures] == [64, 0, 128, 64, 64] and pictures[1][7, 7, 0] == 64


def test_a_sheet_that_fails_warns_once_and_the_run_goes_on(tmp_path, monkeypatch, recwarn):
    def broken(*_):
        raise OSError("no font")

    monkeypatch.setattr(media_module, "contact_sheet", broken)
    module = Counter()
    fit(tmp_path, BRIGHT, SampleLogger(), module=module)
    assert module.weight.item() == 6
    assert sum("no font" in str(w.message) for w in recwarn) == 1


def test_test_has_its_own_sheet(tmp_path):
    run = trainer(tmp_path, BRIGHT, SampleLogger(), logger=TensorBoardLogger(tmp_path, "tb", version=0))
    run.test(Counter(), loader(), verbose=False)
    assert [p.name for p in (tmp_path / "tb" / "version_0" / "images").iterdir()] == ["test_update000000.png"]


def test_without_a_logger_the_files_are_written(tmp_path):
    trainer(tmp_path, BRIGHT, SampleLogger()).validate(Counter(), loader(), verbose=False)
    assert (tmp_path / "images" / "val_update000000.png").is_file()


def test_it_can_be_sent_to_other_processes(tmp_path):
    logger = pickle.loads(pickle.dumps(SampleLogger()))
    trainer(tmp_path, BRIGHT, logger).validate(Counter(), loader(), verbose=False)
    assert (tmp_path / "images" / "val_update000000.png").is_file()


def test_wrong_settings_are_named():
    with pytest.raises(ValueError, match="tile of SampleLogger is 0"):
        SampleLogger(tile=0)


@pytest.mark.distributed
def test_two_ranks_make_one_sheet(tmp_path):
    make = lambda m: rollout(media(value=m.global_rank))  # noqa: E731
    run = trainer(tmp_path, BRIGHT, SampleLogger(num_samples=1), devices=2, strategy="ddp_fork")
    run.validate(Counter(make=make), loader(2), verbose=False)
    (path,) = (tmp_path / "images").iterdir()
    assert np.asarray(Image.open(path))[100, 100].tolist() == [0, 0, 0]
