"""Validation, test and prediction."""

import json

import pytest
import torch

from lit_diffrl.callbacks import FunctionReward
from lit_diffrl.policies import LoRA
from lit_diffrl.rollouts import RolloutDataModule
from tests import helpers


@pytest.fixture
def two_sources(tmp_path):
    path = tmp_path / "p.jsonl"
    rows = [{"prompt": f"a red fox {i}", "source": "ab"[i % 2]} for i in range(6)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def validated(folder, prompts, *rewards, **options):
    module = helpers.algorithm("rvm_reference", folder, **options)
    run = helpers.trainer(limit_val_batches=None)
    run.callbacks = [c for c in run.callbacks if not getattr(c, "is_reward", False)] + list(rewards)
    run.validate(module, datamodule=RolloutDataModule(prompts, prompts, rollout_batch_size=4), verbose=False)
    return module, run


def test_a_prompt_that_no_reward_applies_to_is_not_a_prompt_that_scores_nothing(sd35_folder, two_sources):
    reward = FunctionReward(lambda r: torch.full((len(r),), 0.5), applies_to=["a"])
    reward.name = "half"
    module, run = validated(sd35_folder, two_sources, reward)
    torch.testing.assert_close(module.scores["reward"][::2], torch.full((3,), 0.5).double())
    assert module.scores["reward"][1::2].isnan().all()
    assert run.callback_metrics["val/reward"] == 0.5


def test_scores_stand_in_the_order_of_the_prompts_and_by_source(sd35_folder, two_sources):
    reward = FunctionReward(lambda r: torch.tensor([float(p.split()[-1]) for p in r.prompts]), weight=2.0)
    reward.name = "number"
    module, run = validated(sd35_folder, two_sources, reward)
    assert module.scores["number"].tolist() == [0, 1, 2, 3, 4, 5]
    assert module.scores["reward"].tolist() == [0, 2, 4, 6, 8, 10]
    assert run.callback_metrics["val/source/a"] == 4 and run.callback_metrics["val/source/b"] == 6


def test_failures_of_an_evaluation_are_counted(sd35_folder, two_sources):
    reward = FunctionReward(lambda r: torch.tensor([float("nan") if p.endswith("3") else 1.0 for p in r.prompts]))
    reward.name = "some"
    _, run = validated(sd35_folder, two_sources, reward)
    assert run.callback_metrics["val/failed"] == 1
    assert run.callback_metrics["val/reward"] == 1


def test_evaluation_draws_the_same_media_each_time_whatever_the_seed_of_the_run(sd35_folder, two_sources):
    first, second = (validated(sd35_folder, two_sources, helpers.red())[0].scores["red"] for _ in range(2))
    assert torch.equal(first, second)


def test_frozen_roles_have_no_dropout_while_the_policy_trains_with_it(sd35_folder, two_sources):
    module, _ = validated(sd35_folder, two_sources, helpers.red(), lora=LoRA(rank=2, alpha=4, dropout=0.5))
    module.policy.roles.add("old")
    for p in module.policy.parameters():
        if p.dtype == torch.float32 and p.ndim == 2:
            p.data += 0.05 * torch.randn_like(p)
    module.policy.train()
    x, t = torch.randn(1, 4, 16, 16), torch.full((1,), 500.0)
    draws = [module.frozen_velocity("old", x, t, ["a red fox"]) for _ in range(2)]
    assert torch.equal(*draws)
    assert module.policy.training
    live = [module.velocity(x, t, ["a red fox"]) for _ in range(2)]
    assert not torch.equal(*live)
