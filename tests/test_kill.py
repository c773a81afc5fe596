"""A run that is killed in the middle of a round, and taken up by the same command."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

ROUNDS = 6


def command(folder: Path, config: Path, *options: str) -> list[str]:
    where = [f"--trainer.default_root_dir={folder}", *options]
    return [sys.executable, "-m", "lit_diffrl", "fit", "--config", str(config), *where]


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Everything that the event files hold, but seconds: tag -> step -> value."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[str, dict[int, float]] = {}
    for file in sorted(folder.rglob("events.out.tfevents*")):
        events = EventAccumulator(str(file))
        events.Reload()
        for tag in events.Tags()["scalars"]:
            if not tag.startswith("time/"):
                found.setdefault(tag, {}).update({e.step: e.value for e in events.Scalars(tag)})
    return found


def equal(a, b, where=""):
    assert type(a) is type(b), where
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            equal(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b)):
            equal(x, y, f"{where}[{i}]")
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b), where
    else:
        assert a == b, where


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_run_killed_inside_a_round_ends_as_if_it_had_not_been(tmp_path, prompt_file, sd35_folder, lora):
    policy = {"pretrained": sd35_folder, **({"lora": {"rank": 2, "alpha": 4}} if lora else {})}
    config = {
        "trainer": {
            "max_epochs": ROUNDS,
            "accelerator": "cpu",
            "check_val_every_n_epoch": 2,
            "callbacks": [{"class_path": "EMA", "init_args": {"decay": 0.8}}],
        },
        "omit_callbacks": ["SampleLogger"],
        "model": {
            "class_path": "DiffusionNFT",
            "init_args": {"num_steps": 3, "policy": {"class_path": "SD3Policy", "init_args": policy}},
        },
        "data": {
            "class_path": "RolloutDataModule",
            "init_args": {
                "prompts": str(prompt_file),
                "val_prompts": str(prompt_file),
                "prompts_per_round": 2,
                "group_size": 4,
                "batch_size": 1,
            },
        },
        "rewards": {"red": "tests.helpers.redness"},
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    quiet = {"env": environment, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run(command(tmp_path / "straight", path), check=True, **quiet)

    killed = subprocess.Popen(command(tmp_path / "killed", path), **quiet)
    last = tmp_path / "killed/DiffusionNFT/version_0/checkpoints/last.ckpt"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if last.is_file() and "epoch=2" in str([f.name for f in last.parent.iterdir()]):
            break
        assert killed.poll() is None, "the run ended before it could be killed"
        time.sleep(0.005)
    time.sleep(0.02)  # into the next round
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    assert len(list(scalars(tmp_path / "killed")["reward/mean"])) < ROUNDS
    subprocess.run(command(tmp_path / "killed", path, f"--ckpt_path={last}"), check=True, **quiet)

    runs = [tmp_path / "straight/DiffusionNFT/version_0", tmp_path / "killed/DiffusionNFT/version_1"]
    a, b = (torch.load(run / "checkpoints/last.ckpt", weights_only=True) for run in runs)
    equal(a["state_dict"], b["state_dict"])
    equal(a["optimizer_states"], b["optimizer_states"])
    equal(a["callbacks"]["EMA"], b["callbacks"]["EMA"])
    assert a["global_step"] == b["global_step"] == ROUNDS
    equal(scalars(tmp_path / "straight"), scalars(tmp_path / "killed"))
