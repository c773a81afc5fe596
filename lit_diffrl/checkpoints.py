"""A run from its checkpoint alone: the config travels in the file, and rebuilds the algorithm and its data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from lightning.pytorch.cli import LightningArgumentParser

from lit_diffrl.policies.saved import Weights, config_text, read_checkpoint, weights_of

if TYPE_CHECKING:
    from lit_diffrl.algorithms import DiffusionRL
    from lit_diffrl.rollouts import RolloutDataModule

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
    module.configure_model()
    module.on_load_checkpoint(checkpoint)
    module.load_state_dict(weights_of(checkpoint, weights), strict=module.strict_loading)
