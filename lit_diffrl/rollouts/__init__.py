"""Rollouts: prompts in, scored samples with advantages out, one round a trainer epoch."""

from lit_diffrl.rollouts.advantages import advantages
from lit_diffrl.rollouts.datamodule import RolloutDataModule
from lit_diffrl.rollouts.hooks import RolloutCallback
from lit_diffrl.rollouts.prompts import Prompt, load_prompts
from lit_diffrl.rollouts.rollout import RewardSpec, Rollout

__all__ = ["Prompt", "RewardSpec", "Rollout", "RolloutCallback", "RolloutDataModule", "advantages", "load_prompts"]
