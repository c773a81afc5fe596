"""Algorithms: one LightningModule a file."""

from lit_diffrl.algorithms.base import DiffusionRL
from lit_diffrl.algorithms.flow_grpo import FlowGRPO
from lit_diffrl.algorithms.nft import DiffusionNFT
from lit_diffrl.algorithms.rvm import RVM

__all__ = ["RVM", "DiffusionNFT", "DiffusionRL", "FlowGRPO"]
