"""What may stand under ``trainer.callbacks`` or ``rewards`` in a config."""

from lit_diffrl.callbacks.ema import EMA
from lit_diffrl.callbacks.media import SampleLogger
from lit_diffrl.callbacks.progress import RichRolloutProgressBar, TQDMRolloutProgressBar
from lit_diffrl.callbacks.report import Report
from lit_diffrl.callbacks.rewards import (
    FunctionReward,
    JPEGCompressibility,
    JPEGIncompressibility,
    PromptMatch,
    Reward,
    as_reward,
)
from lit_diffrl.callbacks.threads import Threads
from lit_diffrl.callbacks.writer import SampleWriter

__all__ = [
    "EMA",
    "FunctionReward",
    "JPEGCompressibility",
    "JPEGIncompressibility",
    "PromptMatch",
    "Report",
    "Reward",
    "RichRolloutProgressBar",
    "SampleLogger",
    "SampleWriter",
    "TQDMRolloutProgressBar",
    "Threads",
    "as_reward",
]
