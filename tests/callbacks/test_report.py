import json
import math
import re
import statistics

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lit_diffrl.callbacks import Report
from lit_diffrl.callbacks.comparison import compare
from tests.callbacks.stand_in import Counter, loader, trainer

NAN = math.nan
BEFORE = [0.1, 0.4, 0.2, 0.8]
GAINS = [0.1, 0.3, -0.1, 0.05]


class Scored(Counter):
    """Held-out scores that move by GAINS from BEFORE with every update."""

    def validation_step(self, batch, batch_idx):
        self.seen.append(self.weight.item())

    def on_validation_epoch_end(self):
        reward = torch.tensor(BEFORE).double() + self.weight.item() * torch.tensor(GAINS).double()
        self.scores = {
            "reward": reward,
            "match/strict": torch.tensor([NAN, 0.0, 1.0, self.weight.item() / 10]).double(),
        }


def fit(tmp_path, *callbacks, version=0, updates=2, ckpt=None, **options):
    options = {"max_epochs": 2, "num_sanity_val_steps": -1, "log_every_n_steps": 1, **options}
    logger = TensorBoardLogger(tmp_path, "tb", version=version)
    run = trainer(tmp_path, *callbacks, logger=logger, **options)
    run.fit(Scored(), loader(updates), loader(), ckpt_path=ckpt)
    return tmp_path / "tb" / f"version_{version}"


def test_a_comparison_is_paired_and_leaves_out_what_is_missing():
    before = torch.tensor([0.1, 0.4, NAN, 0.2, 0.8, 0.5]).double()
    after = torch.tensor([0.3, 0.5, 0.9, 0.2, 0.9, NAN]).double()
    changes = [0.2, 0.1, 0.0, 0.1]
    c = compare(before, after)
    assert c.prompts == 4
    assert (c.before, c.after) == pytest.approx((0.375, 0.475))
    assert c.difference == pytest.approx(0.1)
    assert c.standard_error == pytest.approx(statistics.stdev(changes) / 2)
    assert c.ratio == pytest.approx(0.1 / (statistics.stdev(changes) / 2))


@pytest.mark.parametrize(
    "before, after, words",
    [
        (
            [0.0, 0.0, 0.1],
            [0.5, 0.6, 0.5],
            r"rose from 0.03333 to 0.5333, by 0.5 ± 0.058 a prompt over 3 prompts, 8.66 st",
        ),
        ([0.5, 0.6, 0.5], [0.0, 0.0, 0.1], r"fell from 0.5333 to 0.03333, by 0.5 ± 0.058 a prompt"),
        ([0.0, 1.0, 0.1], [0.5, 0.6, 0.5], r"went from 0.3667 to 0.5333, .* which may be chance"),
        ([0.5, 0.5], [0.5, 0.5], "did not move: 0.5 over 2 prompts"),
        ([0.25, 0.5], [0.5, 0.75], "rose from 0.375 to 0.625, by the same on each of 2 prompts"),
        ([0.5], [0.7], "went from 0.5 to 0.7 on one prompt"),
        ([NAN], [0.7], "was not scored"),
    ],
)
def test_words(before, after, words):
    assert re.match(words, compare(torch.tensor(before), torch.tensor(after)).words())


@pytest.mark.parametrize(
    ("before", "after", "cells"),
    [
        ([0.0, 0.5], [0.5, 0.75], ("0.2500", "0.6250", "+0.3750 ± 0.1250 (+3.0)", "2")),
        ([0.5, 0.5], [0.5, 0.5], ("0.5000", "0.5000", "+0.0000 ± 0.0000", "2")),
        ([0.5, NAN], [0.75, 0.5], ("0.5000", "0.7500", "+0.2500", "1")),
        ([NAN], [0.75], ("-", "-", "-", "0")),
    ],
)
def test_cells_have_no_figure_that_there_is_not(before, after, cells):
    assert compare(torch.tensor(before), torch.tensor(after)).cells() == cells


def test_the_last_lines_of_fit(tmp_path, capsys):
    save = ModelCheckpoint(monitor="weight", save_last=True)

    class Log(Callback):
        def on_validation_epoch_end(self, trainer, module):
            self.log("weight", module.weight.item())

    folder = fit(tmp_path, Log(), save, Report(), enable_checkpointing=True)
    out = capsys.readouterr().out
    total = [4 * g for g in GAINS]
    error = statistics.stdev(total) / 2
    assert "2 rounds, 4 updates in " in out
    assert (
        f"to the end the held-out reward went from 0.375 to 0.725, by 0.35 ± {error:.2g} a prompt over 4 prompts" in out
    )
    strict = compare(torch.tensor([0.0, 1.0, 0.0]), torch.tensor([0.0, 1.0, 0.4]))
    assert any(line.split()[:3] == ["match/strict", "0.3333", "0.4667"] for line in out.splitlines())
    assert f"tensorboard --logdir {folder}" in out
    assert f"{folder}/checkpoints" in out and "(weight 2)" in out and "last.ckpt" in out
    report = json.loads((folder / "report.json").read_text())
    assert (report["rounds"], report["updates"], report["before_update"], report["after_update"]) == (2, 4, 0, 4)
    assert report["held_out"]["reward"]["standard_error"] == pytest.approx(error)
    assert report["held_out"]["match/strict"]["difference"] == pytest.approx(strict.difference)
    assert report["held_out"]["match/strict"]["prompts"] == 3


def test_the_scores_before_training_are_logged_at_step_0(tmp_path):
    events = EventAccumulator(str(fit(tmp_path, Report()))).Reload()
    (first,) = events.Scalars("val/reward")
    assert first.step == 0 and first.value == pytest.approx(0.375)
    assert events.Scalars("val/match/strict")[0].value == pytest.approx(1 / 3)


def test_a_resumed_run_compares_with_the_first_beginning(tmp_path, capsys):
    save = ModelCheckpoint(tmp_path, filename="a")
    fit(tmp_path, save, Report(), enable_checkpointing=True, max_epochs=1)
    capsys.readouterr()
    assert torch.load(tmp_path / "a.ckpt", weights_only=True)["callbacks"]["Report"]["update"] == 0
    folder = fit(tmp_path, Report(), version=1, ckpt=tmp_path / "a.ckpt")
    report = json.loads((folder / "report.json").read_text())
    assert report["held_out"]["reward"]["before"] == pytest.approx(0.375)
    assert report["held_out"]["reward"]["after"] == pytest.approx(0.375 + 4 * 0.0875)
    assert (report["before_update"], report["after_update"], report["rounds"]) == (0, 4, 2)


@pytest.mark.parametrize("sanity", [0, 1])
def test_without_a_whole_validation_before_the_first_one_counts(tmp_path, capsys, sanity):
    report = Report()
    run = trainer(tmp_path, report, max_epochs=2, num_sanity_val_steps=sanity)
    run.fit(Scored(), loader(2), loader(3))
    out = capsys.readouterr().out
    assert "From update 2 to the end" in out
    assert report.comparisons["reward"].difference == pytest.approx(2 * 0.0875)


def test_a_run_with_one_validation_says_what_is_missing(tmp_path, capsys):
    fit(tmp_path, Report(), limit_val_batches=0)
    assert "No held-out comparison" in capsys.readouterr().out


def test_other_prompts_begin_anew(tmp_path):
    save = ModelCheckpoint(tmp_path, filename="a")
    fit(tmp_path, save, Report(), enable_checkpointing=True, max_epochs=1)
    report = Report()

    class Fewer(Scored):
        def on_validation_epoch_end(self):
            super().on_validation_epoch_end()
            self.scores = {k: v[:3] for k, v in self.scores.items()}

    with pytest.warns(UserWarning, match="had 4 prompts, now there are 3"):
        trainer(tmp_path, report, max_epochs=3).fit(Fewer(), loader(2), loader(), ckpt_path=tmp_path / "a.ckpt")
    assert report.comparisons["reward"].prompts == 3
    assert report.comparisons["reward"].difference == pytest.approx(2 * 0.1)


def test_an_interrupted_run_reports_what_there_is(tmp_path, capsys):
    class Interrupt(Callback):
        def on_train_epoch_start(self, trainer, module):
            if trainer.current_epoch == 1:
                raise KeyboardInterrupt

    with pytest.raises(SystemExit):
        fit(tmp_path, Interrupt(), Report())
    out = capsys.readouterr().out
    assert "1 round, 2 updates in" in out and "then interrupted." in out and "went from 0.375 to 0.55" in out


def test_a_run_without_an_update_says_that_nothing_was_scored():
    text = Report().text({"rounds": 2, "updates": 0, "seconds": 1.0}, {})
    assert "No sample got a valid reward, so nothing was learnt" in text
