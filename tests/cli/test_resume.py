"""Resuming with another config: the present one counts, and a line says what differs."""

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, SequentialLR, StepLR

from lit_diffrl.cli import main
from lit_diffrl.cli.resume import ConfiguredOptimizer, describe, differences

QUICK = ["--trainer.limit_val_batches=0", "--omit_callbacks=[RichRolloutProgressBar,Report,SampleLogger]"]


def test_differences_are_named_as_on_the_command_line():
    before = {"model": {"class_path": "A", "init_args": {"clip": 1, "gone": 2}}, "data": [1, 2]}
    after = {"model": {"class_path": "B", "init_args": {"clip": 3}}, "data": [1, 2]}
    changes = differences(before, after)
    assert changes == {"model": ("A", "B"), "model.clip": (1, 3), "model.gone": (2, None)}
    assert describe(changes) == "model A -> B, model.clip 1 -> 3, model.gone 2 -> None"
    assert differences(before, before) == {}


def test_a_resumed_run_says_what_it_changes_and_does_it(trained, monkeypatch, capsys):
    folder, ckpt = trained
    monkeypatch.chdir(folder)
    options = ["--model.optimizer.lr", "0.1", "--model.clip", "0.3", "--trainer.max_epochs", "2"]
    root = ["--trainer.default_root_dir", "resumed"]
    main(["fit", "-c", "base.yaml", "--trainer.callbacks=EMA", "--ckpt_path", ckpt, *options, *root, *QUICK])
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("lit-diffrl: resuming")]
    for change in ("model.optimizer.lr 0.001 -> 0.1", "model.clip 0.25 -> 0.3", "trainer.max_epochs 1 -> 2"):
        assert change in line
    (resumed,) = folder.glob("resumed/**/last.ckpt")
    state = torch.load(resumed, weights_only=True)
    # Halved once a round, which makes two rounds of the schedule, from the rate that is configured now.
    assert state["optimizer_states"][0]["param_groups"][0]["lr"] == pytest.approx(0.1 / 4)
    assert "clip: 0.3" in state["lit_diffrl_config"]


def test_a_checkpoint_without_a_config_is_resumed_with_the_given_one(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(trained[0])
    state = torch.load(trained[1], weights_only=True)
    torch.save({k: v for k, v in state.items() if k != "lit_diffrl_config"}, tmp_path / "bare.ckpt")
    root = ["--trainer.default_root_dir", str(tmp_path)]
    main(["fit", "-c", "base.yaml", "--trainer.callbacks=EMA", "--ckpt_path", str(tmp_path / "bare.ckpt"), *root])
    assert "lit-diffrl: resuming, without knowing what has changed" in capsys.readouterr().err


def test_an_unchanged_resume_says_so(trained, monkeypatch, capsys):
    monkeypatch.chdir(trained[0])
    main(["fit", "--ckpt_path", trained[1], "--trainer.default_root_dir", "same"])
    assert "lit-diffrl: resuming" in (err := capsys.readouterr().err)
    assert "trainer.default_root_dir runs -> same" in err and "model" not in err.split("resuming")[1].split("\n")[0]


def test_hyperparameters_in_a_checkpoint_do_not_override_the_command_line(here, trained, printed, tmp_path):
    state = torch.load(trained[1], weights_only=True)
    torch.save({**state, "hyper_parameters": {"clip": 0.01}}, tmp_path / "sly.ckpt")
    config, _ = printed("-c", "base.yaml", "--ckpt_path", str(tmp_path / "sly.ckpt"), "--model.clip", "0.9")
    assert config["model"]["init_args"]["clip"] == 0.9


@pytest.mark.parametrize("part", ["model.optimizer", "model.lr_scheduler"])
def test_another_class_cannot_take_up_the_state(part):
    with pytest.raises(ValueError, match=rf"{part} is SGD now and was AdamW"):
        ConfiguredOptimizer({part: ("AdamW", "SGD")})


SCHEDULES = {
    "none": None,
    "step": lambda o, gamma: StepLR(o, 1, gamma),
    "lambda": lambda o, gamma: LambdaLR(o, lambda n: 1 / (1 + n)),
    "sequence": lambda o, gamma: SequentialLR(o, [ExponentialLR(o, gamma), StepLR(o, 1, gamma)], [2]),
}


class Model(BoringModel):
    def __init__(self, lr: float, momentum: float, schedule: str, gamma: float) -> None:
        super().__init__()
        self.options = lr, momentum, schedule, gamma

    def configure_optimizers(self):
        lr, momentum, schedule, gamma = self.options
        optimizer = torch.optim.SGD(self.parameters(), lr=lr, momentum=momentum)
        if (make := SCHEDULES[schedule]) is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": make(optimizer, gamma), "interval": "step"}}


class Rates(Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []
        self.momentum = 0.0

    def on_train_batch_start(self, trainer, *_):
        group = trainer.optimizers[0].param_groups[0]
        self.seen.append(group["lr"])
        self.momentum = group["momentum"]


def fit(model, folder, steps, *callbacks, ckpt=None):
    from lightning import Trainer

    rates = Rates()
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer = Trainer(max_steps=steps, accelerator="cpu", limit_val_batches=0, callbacks=[*callbacks, rates], **quiet)
    trainer.fit(model, ckpt_path=ckpt)
    trainer.save_checkpoint(folder / "model.ckpt")
    return rates


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_changed_rate_goes_on_where_the_schedule_is(schedule, tmp_path):
    uninterrupted = fit(Model(0.4, 0.5, schedule, 0.8), tmp_path, 6).seen
    fit(Model(0.1, 0.9, schedule, 0.8), tmp_path, 3)
    changes = {"model.optimizer.lr": (0.1, 0.4), "model.optimizer.momentum": (0.9, 0.5)}
    resumed = fit(
        Model(0.4, 0.5, schedule, 0.8), tmp_path, 6, ConfiguredOptimizer(changes), ckpt=tmp_path / "model.ckpt"
    )
    assert resumed.seen == pytest.approx(uninterrupted[3:])
    assert resumed.momentum == 0.5


def test_a_changed_setting_of_the_schedule_holds_from_here_on(tmp_path):
    fit(Model(1.0, 0.0, "step", 0.5), tmp_path, 2)
    changes = {"model.lr_scheduler.gamma": (0.5, 0.1)}
    resumed = fit(Model(1.0, 0.0, "step", 0.1), tmp_path, 4, ConfiguredOptimizer(changes), ckpt=tmp_path / "model.ckpt")
    assert resumed.seen == pytest.approx([0.25, 0.025])


@pytest.mark.parametrize(("before", "after", "rates"), [("none", "step", [1.0, 0.5]), ("step", "none", [1.0, 1.0])])
def test_a_schedule_can_come_or_go(before, after, rates, tmp_path):
    fit(Model(1.0, 0.0, before, 0.5), tmp_path, 2)
    changes = {"model.lr_scheduler": (None, {"class_path": "StepLR"})}
    resumed = fit(Model(1.0, 0.0, after, 0.5), tmp_path, 4, ConfiguredOptimizer(changes), ckpt=tmp_path / "model.ckpt")
    assert resumed.seen == pytest.approx(rates)


def test_settings_that_did_not_change_stay_as_the_checkpoint_has_them(tmp_path):
    fit(Model(1.0, 0.0, "step", 0.5), tmp_path, 2)
    resumed = fit(Model(9.0, 0.0, "step", 0.5), tmp_path, 3, ConfiguredOptimizer({}), ckpt=tmp_path / "model.ckpt")
    assert resumed.seen == pytest.approx([0.25])
