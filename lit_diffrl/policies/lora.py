"""Low-rank adapters through peft and diffusers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn


@dataclass(frozen=True)
class LoRA:
    """Low-rank adaptation of the transformer (arXiv 2106.09685).

    Attributes:
        rank: of the update.
        alpha: its scale is ``alpha / rank``.
        dropout: on the adapters' input. Algorithms with a likelihood ratio switch it off, for a ratio of two dropout
            masks means nothing.
        init: ``gaussian`` or ``kaiming`` start of the down-projection; the up-projection starts at 0.
        targets: suffixes of the linear layers to adapt; those of the model family where omitted.
    """

    rank: int = 32
    alpha: float = 64.0
    dropout: float = 0.0
    init: Literal["gaussian", "kaiming"] = "gaussian"
    targets: list[str] | None = None

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.rank < 1:
            raise ValueError(f"lora.rank is {self.rank}; it must be at least 1")
        if self.alpha <= 0:
            raise ValueError(f"lora.alpha is {self.alpha}; it must be above 0, or the adapter would do nothing")
        if self.targets is not None and not self.targets:
            raise ValueError("lora.targets is empty; leave it out for the layers of the model family")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"lora.dropout is {self.dropout}; it must lie in [0, 1)")

    def config(self, targets: tuple[str, ...]) -> Any:
        """The configuration of peft."""
        from peft import LoraConfig

        return LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,
            lora_dropout=self.dropout,
            init_lora_weights="gaussian" if self.init == "gaussian" else True,
            target_modules=list(self.targets or targets),
        )

    def attach(self, transformer: nn.Module, targets: tuple[str, ...], name: str = "default") -> None:
        """Add a trainable adapter in float32, whatever the precision of the base."""
        transformer.add_adapter(  # type: ignore[operator]
            self.config(targets), adapter_name=name
        )
        for key, parameter in transformer.named_parameters():
            if f".{name}." in key and "lora_" in key:
                parameter.data = parameter.data.to(torch.float32)
