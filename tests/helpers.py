"""Small pieces that several tests train with."""

from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import torch

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
from lit_diffrl.callbacks import FunctionReward
from lit_diffrl.policies import LoRA, SD3Policy
from lit_diffrl.rollouts import Rollout, RolloutDataModule

ALGORITHMS = {
    "flow_grpo": lambda p, **k: FlowGRPO(p, num_steps=4, kl=0.01, **k),
    "flow_grpo_window": lambda p, **k: FlowGRPO(p, num_steps=5, window=2, guard=True, **k),
    "dance_grpo": lambda p, **k: DanceGRPO(p, num_steps=4, **k),
    "mix_grpo": lambda p, **k: MixGRPO(p, num_steps=4, window=2, shift_every=1, **k),
    "flash_grpo": lambda p, **k: FlashGRPO(p, num_steps=4, **k),
    # Two groups, one of them interpolated.
    "jagg": lambda p, **k: JAGG(p, num_steps=7, window=3, jagg_frac=0.5, diagnose_every=2, **k),
    "rvm_ema": lambda p, **k: RVM(p, num_steps=3, beta=0.1, anchor="ema", **k),
    "rvm_reference": lambda p, **k: RVM(p, num_steps=3, beta=0.1, anchor="reference", anchor_guidance_scale=2.0, **k),
    "nft": lambda p, **k: DiffusionNFT(p, num_steps=3, kl=0.1, lag=0.5, **k),
    "awm": lambda p, **k: AWM(p, num_steps=4, kl=0.1, ema_rate=0.1, off_policy=True, **k),
    "opd": lambda p, **k: DiffusionOPD(p, {"*": teacher(p.pretrained)}, num_steps=3, **k),
    "reinforce_opd": lambda p, **k: ReinforceOPD(p, {"*": teacher(p.pretrained)}, num_steps=3, clip=0.1, **k),
}


@cache
def teacher(folder: str) -> str:
    """A trained adapter of the model in a folder, beside which it is put; the global generator stays as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        policy = SD3Policy(folder, lora=LoRA(rank=3, alpha=9))
        policy.load()
        for p in policy.parameters():
            if p.requires_grad:
                p.data += 0.1 * torch.randn_like(p)
    policy.export(f"{folder}_teacher")
    return f"{folder}_teacher"


def redness(rollout: Rollout) -> torch.Tensor:
    return rollout.media[:, 0].mean((1, 2)) - rollout.media.mean((1, 2, 3))


def red() -> FunctionReward:
    reward = FunctionReward(redness)
    reward.name = "red"
    return reward


def algorithm(name: str, folder: str, lora: LoRA | None = None, lr: float = 1e-3, **options: Any) -> DiffusionRL:
    return ALGORITHMS[name](SD3Policy(folder, lora=lora), optimizer=lambda p: torch.optim.AdamW(p, lr=lr), **options)


def data(prompts: Path, **options: Any) -> RolloutDataModule:
    defaults = dict(prompts_per_round=2, group_size=4, rollout_batch_size=8, batch_size=8, seed=1)
    return RolloutDataModule(prompts, prompts, **(defaults | options))


def trainer(*callbacks: L.Callback, **options: Any) -> L.Trainer:
    defaults = dict(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
    )
    return L.Trainer(callbacks=[red(), *callbacks], **(defaults | options))


def weights(module: DiffusionRL) -> dict[str, torch.Tensor]:
    return {k: v.detach().clone() for k, v in module.policy.trainable_state(module.policy.state_dict()).items()}
