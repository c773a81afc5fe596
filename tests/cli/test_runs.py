"""Runs: their directories, their checkpoints, and what can be done with a checkpoint alone."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_diffrl import RolloutDataModule, load_run
from lit_diffrl.algorithms import FlowGRPO
from lit_diffrl.callbacks import Report, RichRolloutProgressBar, SampleLogger, SampleWriter
from lit_diffrl.cli import main
from lit_diffrl.cli.standard import complete

QUICK = ["--trainer.limit_val_batches=0", "--omit_callbacks=[RichRolloutProgressBar,Report,SampleLogger]"]


def test_a_run_has_a_directory_of_its_own_under_runs(trained):
    folder, ckpt = trained
    log = folder / "runs" / "FlowGRPO" / "version_0"
    assert Path(ckpt) == log / "checkpoints" / "last.ckpt"
    assert list(log.glob("events.out.tfevents.*"))
    assert yaml.safe_load((log / "config.yaml").read_text())["model"]["init_args"]["clip"] == 0.25


def test_the_checkpoint_holds_the_resolved_config_as_text(trained):
    folder, ckpt = trained
    held = yaml.safe_load(torch.load(ckpt, weights_only=True)["lit_diffrl_config"])
    written = yaml.safe_load((folder / "runs/FlowGRPO/version_0/config.yaml").read_text())
    assert {k: written[k] for k in held} == held
    assert set(written) - set(held) == {"ckpt_path", "weights_only"}


def test_a_run_is_rebuilt_from_its_checkpoint(trained, monkeypatch):
    folder, ckpt = trained
    monkeypatch.chdir(folder)
    (folder / "base.yaml").rename(folder / "elsewhere")
    module, data = load_run(ckpt)
    averaged, _ = load_run(ckpt, weights="ema")
    (folder / "elsewhere").rename(folder / "base.yaml")
    assert isinstance(module, FlowGRPO) and isinstance(data, RolloutDataModule)
    assert (module.clip, data.group_size, data.seed) == (0.25, 3, 5)
    state = torch.load(ckpt, weights_only=True)
    live = module.state_dict()
    assert all(live[k].equal(v) for k, v in state["state_dict"].items())
    average = state["callbacks"]["EMA"]["average"]
    assert all(averaged.state_dict()[k].equal(v) for k, v in average.items())
    assert not all(live[k].equal(v) for k, v in average.items())


def test_commands_need_only_the_checkpoint(trained, monkeypatch, capsys):
    folder, ckpt = trained
    monkeypatch.chdir(folder)
    main(["validate", "--ckpt_path", ckpt, "--trainer.default_root_dir", "again"])
    assert "val/reward" in capsys.readouterr().out
    main(["predict", f"--ckpt_path={ckpt}", "--trainer.default_root_dir", "again"])
    assert list((folder / "again").rglob("samples/*.png"))


def test_options_win_over_the_config_of_the_checkpoint(trained, printed, monkeypatch):
    monkeypatch.chdir(trained[0])
    config, _ = printed("--ckpt_path", trained[1], "--model.eval_num_steps", "7", command="validate")
    assert config["model"]["init_args"]["eval_num_steps"] == 7
    assert config["model"]["init_args"]["clip"] == 0.25


@pytest.mark.parametrize("weights", ["live", "ema"])
def test_export_writes_the_weights_that_are_asked_for(trained, weights, tmp_path, monkeypatch, capsys):
    from safetensors.torch import load_file

    monkeypatch.chdir(tmp_path)  # neither prompts nor the config are here
    main(["export", "--ckpt_path", trained[1], "--out_dir", "out", "--weights", weights])
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"lit-diffrl: wrote the {weights} weights") and ("--weights ema" in said) == (
        weights == "live"
    )
    (file,) = (tmp_path / "out").iterdir()
    state = torch.load(trained[1], weights_only=True)
    wanted = state["state_dict"] if weights == "live" else state["callbacks"]["EMA"]["average"]
    norm = sum(t.double().square().sum() for k, t in wanted.items() if "lora" in k)
    assert sum(t.double().square().sum() for t in load_file(file).values()) == pytest.approx(norm.item(), rel=1e-6)


def test_export_does_not_advertise_an_average_that_has_not_begun(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    state = torch.load(trained[1], weights_only=True)
    state["callbacks"]["EMA"]["average"] = {}
    torch.save(state, tmp_path / "early.ckpt")
    main(["export", "--ckpt_path", "early.ckpt", "--out_dir", "out"])
    assert "--weights ema" not in capsys.readouterr().err


def test_export_of_an_average_that_is_not_there_is_refused(here, refused):
    main(["fit", "-c", "base.yaml", *QUICK])
    (ckpt,) = here.rglob("last.ckpt")
    assert "holds no average" in refused("export", "--ckpt_path", str(ckpt), "--weights", "ema")


def test_a_checkpoint_without_a_config_asks_for_one(trained, refused, tmp_path):
    state = torch.load(trained[1], weights_only=True)
    torch.save({k: v for k, v in state.items() if k != "lit_diffrl_config"}, tmp_path / "bare.ckpt")
    assert "has to be given with --config" in refused("validate", "--ckpt_path", str(tmp_path / "bare.ckpt"))
    with pytest.raises(ValueError, match="holds no config"):
        load_run(tmp_path / "bare.ckpt")


@pytest.mark.slow
def test_fit_prints_no_warning_and_nothing_about_hardware_that_is_not_there(here):
    run = [sys.executable, "-m", "lit_diffrl", "fit", "-c", "base.yaml", "--trainer.precision=bf16-mixed"]
    done = subprocess.run(
        [*run, "--model", "DiffusionNFT", *QUICK], check=True, capture_output=True, text=True, timeout=300
    )
    assert [line for line in done.stderr.splitlines() if "TPU" in line or "arning" in line or ".py:" in line] == []
    assert "GPU available" in done.stderr


def test_two_runs_in_one_directory_keep_both_configs(here):
    logger = ["--trainer.logger=CSVLogger", "--trainer.logger.save_dir=fixed", "--trainer.logger.version=one"]
    for clip in ("0.1", "0.2"):
        main(["fit", "-c", "base.yaml", *logger, *QUICK, "--model.clip", clip])
    configs = sorted(here.rglob("config*.yaml"))
    assert [c.name for c in configs] == ["config.yaml", "config_1.yaml"]
    assert [yaml.safe_load(c.read_text())["model"]["init_args"]["clip"] for c in configs] == [0.1, 0.2]


def test_two_runs_of_one_command_have_two_directories(here):
    for _ in range(2):
        main(["fit", "-c", "base.yaml", *QUICK])
    assert len(list(here.glob("runs/FlowGRPO/version_*/config.yaml"))) == 2


def test_a_plain_function_is_a_reward(here):
    (here / "mine_function.py").write_text("def red(rollout):\n    return rollout.media[:, 0].mean((1, 2))\n")
    (here / "rewards.yaml").write_text("rewards:\n  redness: mine_function.red\n")
    main(["fit", "-c", "base.yaml", "-c", "rewards.yaml", *QUICK])
    (ckpt,) = here.rglob("last.ckpt")
    assert yaml.safe_load(torch.load(ckpt, weights_only=True)["lit_diffrl_config"])["rewards"] == {
        "redness": "mine_function.red"
    }


class TestStandardCallbacks:
    """Each is there unasked, replaced by one of its kind, and gone when it is omitted."""

    @staticmethod
    def of(command: str, *own: Callback, omit: tuple = (), **settings: bool) -> tuple[list[type], dict]:
        trainer = {"callbacks": list(own), "enable_progress_bar": None, "enable_checkpointing": None, **settings}
        complete(trainer, command, list(omit))
        return [type(c) for c in trainer["callbacks"]], trainer

    def test_by_command(self):
        assert self.of("fit")[0] == [RichRolloutProgressBar, Report, SampleLogger, ModelCheckpoint]
        assert self.of("validate")[0] == [RichRolloutProgressBar, Report, SampleLogger]
        assert self.of("predict")[0] == [RichRolloutProgressBar, SampleWriter]

    def test_one_of_the_user_takes_the_place(self):
        own = ModelCheckpoint(monitor="val/reward")
        kinds, trainer = self.of("fit", own)
        assert kinds.count(ModelCheckpoint) == 1 and trainer["callbacks"][0] is own

    def test_an_omitted_one_is_not_replaced_by_lightning(self):
        kinds, trainer = self.of("fit", omit=("ModelCheckpoint", "RichRolloutProgressBar", "Report", "SampleLogger"))
        assert kinds == []
        assert trainer["enable_checkpointing"] is False and trainer["enable_progress_bar"] is False
        Trainer(**trainer, logger=False, accelerator="cpu")

    def test_lightnings_switches_count(self):
        kinds, trainer = self.of("fit", enable_progress_bar=False, enable_checkpointing=False)
        assert kinds == [Report, SampleLogger]
        Trainer(**trainer, logger=False, accelerator="cpu")


@pytest.mark.distributed
@pytest.mark.slow
def test_two_processes_share_one_run(here):
    command = [sys.executable, "-m", "lit_diffrl", "fit", "-c", "base.yaml", "--trainer.devices=2", *QUICK]
    sizes = ["--data.group_size=4", "--data.rollout_batch_size=2", "--data.batch_size=2"]
    subprocess.run([*command, "--trainer.strategy=ddp", *sizes], check=True, capture_output=True, timeout=300)
    assert len(list(here.rglob("config*.yaml"))) == len(list(here.rglob("last.ckpt"))) == 1
