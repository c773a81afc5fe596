"""Reinforcement-learning post-training of diffusion and flow-matching models on PyTorch Lightning."""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_diffrl.algorithms import (
        AWM,
        JAGG,
        RVM,
        DanceGRPO,
        DiffusionNFT,
        DiffusionOPD,
        DiffusionRL,
        FlashGRPO,
        FlowGRPO,
        MixGRPO,
        ReinforceOPD,
    )
    from lit_diffrl.checkpoints import load_run
    from lit_diffrl.policies import LoRA, Policy, SD3Policy, Teacher
    from lit_diffrl.rollouts import Rollout, RolloutDataModule

__version__ = version("lit-diffrl")

# Looked up on first use: `lit-diffrl --help` must not wait for torch.
_HOMES = {
    "lit_diffrl.algorithms": (
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
    ),
    "lit_diffrl.checkpoints": ("load_run",),
    "lit_diffrl.policies": ("LoRA", "Policy", "SD3Policy", "Teacher"),
    "lit_diffrl.rollouts": ("Rollout", "RolloutDataModule"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

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
    "LoRA",
    "MixGRPO",
    "Policy",
    "ReinforceOPD",
    "Rollout",
    "RolloutDataModule",
    "SD3Policy",
    "Teacher",
    "__version__",
    "load_run",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
