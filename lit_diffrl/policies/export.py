"""Trained weights in the formats that stock diffusers loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from lit_diffrl.policies.roles import DEFAULT


def export_lora(pipeline: Any, folder: Path) -> Path:
    """Write the trained adapter for ``pipeline.load_lora_weights(folder)``.

    The adapter's configuration goes into the file: without it alpha is lost, and the adapter loads at another strength
    without an error.
    """
    from peft import get_peft_model_state_dict

    transformer = pipeline.transformer
    type(pipeline).save_lora_weights(
        folder,
        transformer_lora_layers=get_peft_model_state_dict(transformer, adapter_name=DEFAULT),
        transformer_lora_adapter_metadata=transformer.peft_config[DEFAULT].to_dict(),
    )
    return folder / "pytorch_lora_weights.safetensors"


def export_transformer(transformer: nn.Module, folder: Path) -> Path:
    """Write the whole transformer, for ``from_pretrained(folder, subfolder="transformer")``, in safetensors."""
    transformer.save_pretrained(folder / "transformer")  # type: ignore[operator]
    return folder / "transformer"


@torch.no_grad()
def load_lora(pipeline: Any, folder: str | Path) -> None:
    """Load an exported adapter into a stock pipeline, and make sure that it did load.

    Raises:
        ValueError: if no key of the file fits the transformer, which stock loading accepts with a warning.
    """
    from safetensors import safe_open

    file = Path(folder) / "pytorch_lora_weights.safetensors"
    with safe_open(file, "pt") as tensors:
        keys = [k for k in tensors.keys() if ".lora" in k]  # noqa: SIM118
    modules = {name for name, _ in pipeline.transformer.named_modules()}
    fitting = [k for k in keys if k.removeprefix("transformer.").split(".lora")[0] in modules]
    if not fitting:
        raise ValueError(
            f"{file}: 0 of its {len(keys)} adapter tensors match the transformer, so it would change nothing"
        )
    pipeline.load_lora_weights(str(folder))
