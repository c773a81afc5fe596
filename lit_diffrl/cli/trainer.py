"""Lightning's trainer with one more thing to do."""

from pathlib import Path

import lightning as L

from lit_diffrl.algorithms import DiffusionRL
from lit_diffrl.checkpoints import load_weights
from lit_diffrl.cli.console import say
from lit_diffrl.policies.saved import Weights, average_of, read_checkpoint


class Trainer(L.Trainer):
    """Lightning's trainer, which can also export."""

    def export(
        self,
        model: DiffusionRL,
        ckpt_path: Path,
        datamodule: L.LightningDataModule | None = None,
        out_dir: Path = Path("export"),
        weights: Weights = "live",
    ) -> None:
        """Write the policy of a checkpoint in the format of diffusers.

        Args:
            model: whose policy is written.
            ckpt_path: the checkpoint.
            datamodule: not needed.
            out_dir: the directory to write to.
            weights: the ones in training, or their average where the run had the callback EMA.
        """
        checkpoint = read_checkpoint(ckpt_path)
        load_weights(model, checkpoint, weights)
        model.policy.export(out_dir)
        averaged = average_of(checkpoint)
        hint = "; the checkpoint also holds their average, --weights ema" if averaged and weights == "live" else ""
        say(f"wrote the {weights} weights of {ckpt_path} to {out_dir}{hint}")
