"""What the checkpoint file of a run holds: the trained weights, their average, and the config."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

Weights = Literal["live", "ema"]
CONFIG_KEY = "lit_diffrl_config"
# Under which a checkpoint's `callbacks` hold the average of the callback EMA.
EMA_KEY = "EMA"


def find_checkpoint(path: str | Path) -> Path | None:
    """The checkpoint file of a run.

    Args:
        path: the file, the folder of the run, or the one above it, in which the newest ``version_<n>`` that holds a
            checkpoint counts.

    Returns:
        The file, which exists unless it was named itself; ``None`` for anything else.
    """
    path = Path(path).expanduser()
    if path.suffix == ".ckpt":
        return path
    versions = sorted(path.glob("version_*"), key=lambda p: int(re.sub(r"\D", "", p.name) or 0), reverse=True)
    files = (folder / "checkpoints" / "last.ckpt" for folder in (path, *versions))
    return next((file for file in files if file.is_file()), None)


def weights_of(checkpoint: dict[str, Any], weights: Weights = "live") -> dict[str, Tensor]:
    """The weights in a checkpoint: the live ones, or with the average in their place.

    Raises:
        ValueError: if the checkpoint holds no average where it is asked for.
    """
    if weights == "live":
        return checkpoint["state_dict"]
    average = average_of(checkpoint)
    if not average:
        raise ValueError(
            "the checkpoint holds no average: it was trained without the callback EMA, or not up to start_step"
        )
    return checkpoint["state_dict"] | average


def average_of(checkpoint: dict[str, Any]) -> dict[str, Tensor]:
    """The average in a checkpoint, empty where there is none."""
    return checkpoint.get("callbacks", {}).get(EMA_KEY, {}).get("average") or {}


def read_checkpoint(ckpt_path: str | Path) -> dict[str, Any]:
    """Read a checkpoint file, tensors on the CPU and left on disk until they are used.

    Raises:
        FileNotFoundError: if there is none.
        ValueError: for a directory, which holds a checkpoint in shards, and for a file of another kind.
    """
    path = Path(ckpt_path)
    if path.is_dir():
        raise ValueError(
            f"{path} is a checkpoint in shards: join it with `python -m lightning.pytorch.utilities."
            f"consolidate_checkpoint {path}`, and give the file that this writes"
        )
    if not path.is_file():
        raise FileNotFoundError(f"there is no checkpoint {path}")
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, pickle.UnpicklingError) as e:
        raise ValueError(f"{path} is not a checkpoint, or it is damaged: {e}") from e


def read_config(ckpt_path: str | Path) -> str:
    """The config that a checkpoint was trained with, as YAML.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it holds none.
    """
    meta = Path(ckpt_path) / "meta.pt"  # where strategies that write shards put all but the tensors
    return config_text(read_checkpoint(meta if meta.is_file() else ckpt_path), ckpt_path)


def config_text(checkpoint: dict[str, Any], ckpt_path: str | Path) -> str:
    """The config in a checkpoint that is read already, as YAML.

    Raises:
        ValueError: if it holds none.
    """
    if CONFIG_KEY not in checkpoint:
        raise ValueError(
            f"{ckpt_path} holds no config: it was not written by `lit-diffrl fit`, or with `save_weights_only`. "
            "The config of its run has to be given with --config"
        )
    return checkpoint[CONFIG_KEY]
