"""The example of a user's project, run as the user runs it."""

import shutil
from pathlib import Path

import torch

from lit_diffrl.cli import main

ROOT = Path(__file__).parents[1]


def test_a_project_with_its_own_algorithm_and_rewards_trains(tmp_path, monkeypatch):
    for file in (ROOT / "examples" / "my_project").iterdir():
        if file.is_file():
            shutil.copy(file, tmp_path)
    (tmp_path / "val.txt").write_text("a red circle on black\n")
    monkeypatch.chdir(tmp_path)
    small = ["--data.prompts_per_round", "1", "--data.group_size", "2", "--data.rollout_batch_size", "2"]
    small += ["--data.batch_size", "2", "--data.val_prompts", "val.txt", "--model.num_steps", "2"]
    main(["fit", "--config", "my_project.yaml", "--trainer.max_epochs", "2", "--trainer.accelerator", "cpu", *small])
    (ckpt,) = tmp_path.rglob("last.ckpt")
    state = torch.load(ckpt, weights_only=True)
    assert state["epoch"] == 1
    assert "my_project.RewardWeightedRegression" in state["lit_diffrl_config"]
    assert ckpt.relative_to(tmp_path).parts[:2] == ("runs", "RewardWeightedRegression")
