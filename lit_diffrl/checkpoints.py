"""A run from its checkpoint alone: the config travels in the file, and rebuilds the algorithm and its data."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import yaml
from lightning.pytorch.cli import LightningArgumentParser

if TYPE_CHECKING:
    from lit_diffrl.algorithms import DiffusionRL
    from lit_diffrl.rollouts import RolloutDataModule

Weights = Literal["live", "ema"]
CONFIG_KEY = "lit_diffrl_config"
# What describes a run; the rest of a config belongs to the one command that was given.
RUN_KEYS = ("seed_everything", "trainer", "model", "data", "rewards", "omit_callbacks")


def load_run(ckpt_path: str | Path, weights: Weights = "live") -> tuple[DiffusionRL, RolloutDataModule]:
    """Rebuild the algorithm, with its weights, and the data of a run.

    Args:
        ckpt_path: a checkpoint that ``lit-diffrl fit`` wrote.
        weights: ``live``, those in training, or ``ema``, their average.

    Returns:
        The algorithm on the CPU and the data module, as ``Trainer.validate(module, datamodule=data)`` takes them.

    Raises:
        ValueError: if the checkpoint holds no config, no average where it is asked for, or weights of another model.
    """
    from lit_diffrl.algorithms import DiffusionRL
    from lit_diffrl.rollouts import RolloutDataModule

    checkpoint = read_checkpoint(ckpt_path)
    config = yaml.safe_load(config_text(checkpoint, ckpt_path))
    run = build(config, model=DiffusionRL, data=RolloutDataModule)
    seed = config.get("seed_everything")
    if config["data"]["init_args"].get("seed") is None and not isinstance(seed, bool | None):
        run["data"].seed = seed  # which `fit` would have got from the environment
    load_weights(run["model"], checkpoint, weights)
    return run["model"], run["data"]


def build(config: dict[str, Any], **classes: type) -> dict[str, Any]:
    """Build parts of a config.

    Args:
        config: of a run.
        classes: key in the config -> the base of what stands there.
    """
    parser = LightningArgumentParser(exit_on_error=False)
    for key, cls in classes.items():
        parser.add_subclass_arguments(cls, key, fail_untyped=False)
    parsed = parser.parse_object({key: config[key] for key in classes})
    return dict(parser.instantiate(parsed).items(branches=True, nested=False))


def load_weights(module: DiffusionRL, checkpoint: dict[str, Any], weights: Weights) -> None:
    """Load the model that ``module`` trains, and into it the weights of a checkpoint.

    Raises:
        ValueError: if the checkpoint is of another model, or holds no average where it is asked for.
    """
    from lit_diffrl.callbacks.ema import averaged_state_dict

    state = averaged_state_dict(checkpoint) if weights == "ema" else checkpoint["state_dict"]
    module.configure_model()
    module.on_load_checkpoint(checkpoint)
    module.load_state_dict(state, strict=module.strict_loading)


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
