"""Reinforcement-learning post-training of diffusion and flow-matching models on PyTorch Lightning."""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_diffrl.algorithms import RVM, DiffusionNFT, DiffusionRL, FlowGRPO
    from lit_diffrl.checkpoints import load_run
    from lit_diffrl.policies import LoRA, Policy, SD3Policy
    from lit_diffrl.rollouts import Rollout, RolloutDataModule

__version__ = version("lit-diffrl")

# Looked up on first use: `lit-diffrl --help` must not wait for torch.
_HOMES = {
    "lit_diffrl.algorithms": ("RVM", "DiffusionNFT", "DiffusionRL", "FlowGRPO"),
    "lit_diffrl.checkpoints": ("load_run",),
    "lit_diffrl.policies": ("LoRA", "Policy", "SD3Policy"),
    "lit_diffrl.rollouts": ("Rollout", "RolloutDataModule"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "RVM",
    "DiffusionNFT",
    "DiffusionRL",
    "FlowGRPO",
    "LoRA",
    "Policy",
    "Rollout",
    "RolloutDataModule",
    "SD3Policy",
    "__version__",
    "load_run",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
