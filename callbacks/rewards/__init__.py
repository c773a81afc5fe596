"""Rewards, each a callback that scores samples."""

from lit_diffrl.callbacks.rewards.base import FunctionReward, Reward, as_reward
from lit_diffrl.callbacks.rewards.jpeg import JPEGCompressibility, JPEGIncompressibility
from lit_diffrl.callbacks.rewards.prompt_match import PromptMatch

__all__ = [
    "FunctionReward",
    "JPEGCompressibility",
    "JPEGIncompressibility",
    "PromptMatch",
    "Reward",
    "as_reward",
]
