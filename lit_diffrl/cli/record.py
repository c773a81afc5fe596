"""The config of a run, kept beside its logs and inside its checkpoints."""

import re
from pathlib import Path
from typing import Any

import lightning as L
import yaml
from lightning.pytorch.cli import SaveConfigCallback

from lit_diffrl.checkpoints import RUN_KEYS
from lit_diffrl.policies.saved import CONFIG_KEY


class RunRecord(SaveConfigCallback):
    """Writes the config into the directory of the run, under a name that is not taken, and into its checkpoints."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Choose a name that is not taken, and write."""
        if not self.already_saved:
            folder = trainer.log_dir  # a collective: on every rank
            name = _free_name(folder) if trainer.is_global_zero else ""
            self.config_filename = trainer.strategy.broadcast(name)
        super().setup(trainer, pl_module, stage)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Put the config of the run into the checkpoint."""
        checkpoint[CONFIG_KEY] = yaml.safe_dump(self.run_config, sort_keys=False)

    @property
    def run_config(self) -> dict[str, Any]:
        """The resolved config, without what belongs to the command."""
        return run_config(self.parser.dump(self.config, skip_none=False))


def run_config(text: str) -> dict[str, Any]:
    """The part of a config in YAML that describes the run."""
    config = yaml.safe_load(text)
    return {key: config[key] for key in RUN_KEYS if key in config}


def _free_name(folder: str | None) -> str:
    taken = {path.name for path in Path(folder or ".").glob("config*.yaml")}
    numbers = [int(m[1]) for name in taken if (m := re.fullmatch(r"config_(\d+)\.yaml", name))]
    return "config.yaml" if "config.yaml" not in taken else f"config_{max(numbers, default=0) + 1}.yaml"
