"""Algorithms: one LightningModule a file."""

from lit_diffrl.algorithms.awm import AWM
from lit_diffrl.algorithms.base import DiffusionRL
from lit_diffrl.algorithms.dance_grpo import DanceGRPO
from lit_diffrl.algorithms.flash_grpo import FlashGRPO
from lit_diffrl.algorithms.flow_grpo import FlowGRPO
from lit_diffrl.algorithms.jagg import JAGG
from lit_diffrl.algorithms.mix_grpo import MixGRPO
from lit_diffrl.algorithms.nft import DiffusionNFT
from lit_diffrl.algorithms.opd import DiffusionOPD
from lit_diffrl.algorithms.reinforce_opd import ReinforceOPD
from lit_diffrl.algorithms.rvm import RVM

__all__ = [
    "AWM",
    "JAGG",
    "RVM",
    "DanceGRPO",
    "DiffusionNFT",
    "DiffusionOPD",
    "DiffusionRL",
    "FlashGRPO",
    "FlowGRPO",
    "MixGRPO",
    "ReinforceOPD",
]
