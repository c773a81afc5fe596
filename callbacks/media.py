"""Samples to look at while training: in TensorBoard and as files."""

from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_warn
from PIL import Image
from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor

from lit_diffrl.callbacks.checks import check_media
from lit_diffrl.callbacks.ema import EMA
from lit_diffrl.callbacks.encode import DEFAULT_FPS, gif, to_pil, write_clip
from lit_diffrl.callbacks.sheet import caption_font, contact_sheet
from lit_diffrl.rollouts import Rollout, RolloutCallback


class SampleLogger(RolloutCallback):
    """Shows the same held-out prompts at every validation and test, as a contact sheet with prompts and rewards.

    The sheet goes to TensorBoard (``val/samples``, ``test/samples``) and to ``images/`` in the run's log folder: a PNG
    of images, an MP4 of videos (a GIF without PyAV, and in TensorBoard). Its headline names the progress, the sampler
    of evaluation, and whether the weights are the live ones or the average of :class:`~lit_diffrl.callbacks.EMA`. If a
    sheet cannot be drawn or written, one warning is given and the run continues. Rank 0 shows its share of the prompts.

    Args:
        num_samples: prompts on the sheet.
        columns: samples in a row.
        tile: px that the longer side of a sample takes on the sheet; smaller samples are enlarged by whole factors.
        every_n_validations: how often a sheet is made; the first one is the first validation's.
        font: a TrueType file for prompts with other letters than those of English.
    """

    def __init__(
        self,
        num_samples: int = 16,
        columns: int = 4,
        tile: int = 256,
        every_n_validations: int = 1,
        font: Path | None = None,
    ) -> None:
        settings = {"num_samples": num_samples, "columns": columns, "tile": tile}
        for name, value in {**settings, "every_n_validations": every_n_validations}.items():
            if value < 1:
                raise ValueError(f"{name} of SampleLogger is {value}; it must be at least 1")
        self.num_samples = num_samples
        self.columns = columns
        self.tile = tile
        self.every_n_validations = every_n_validations
        caption_font(font)  # a file that cannot be read is found here
        self.font = font
        self.validations = 0
        self._shown: list[_Shown] = []
        self._weights = ""
        self._warned = False

    def on_rollout_batch_end(self, trainer: L.Trainer, module: L.LightningModule, rollout: Rollout) -> None:
        """Keep the first samples of an evaluation."""
        due = trainer.testing or self.validations % self.every_n_validations == 0
        if not trainer.evaluating or not trainer.is_global_zero or trainer.fast_dev_run or not due:  # type: ignore[attr-defined]
            return
        check_media(rollout, "any", "SampleLogger")
        real = [i for i, number in enumerate(rollout.sample_ids.tolist()) if number >= 0]
        self._shown += [_Shown(rollout, i) for i in real[: self.num_samples - len(self._shown)]]
        ema = next((c for c in trainer.callbacks if isinstance(c, EMA) and c.swapped_in), None)  # type: ignore[attr-defined]
        self._weights = f"averaged weights (EMA {ema.decay:g})" if ema else "live weights"

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Write the sheet."""
        self.validations += 1
        self._write(trainer, module, "val")

    def on_test_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Write the sheet."""
        self._write(trainer, module, "test")

    def _write(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        folder = trainer.log_dir  # a broadcast, hence on all ranks
        shown, self._shown = self._shown, []
        if not shown or folder is None:
            return
        try:
            headline = f"{_progress(trainer)}: {module.sampler_description}, {self._weights}"
            frames = self._frames(shown, headline)
            stem = Path(folder) / "images" / f"{stage}_update{trainer.global_step:06d}"
            stem.parent.mkdir(parents=True, exist_ok=True)
            fps = shown[0].fps
            if len(frames) == 1:
                frames[0].save(stem.with_suffix(".png"))
            else:
                write_clip(frames, fps, stem)
            for logger in trainer.loggers:
                if isinstance(logger, TensorBoardLogger):
                    _add_to_tensorboard(logger, f"{stage}/samples", frames, fps, trainer.global_step)
        except Exception as e:
            if not self._warned:
                self._warned = True
                rank_zero_warn(f"SampleLogger could not show the samples (said once; the run continues): {e!r}")

    def _frames(self, shown: list["_Shown"], headline: str) -> list[Image.Image]:
        captions = [s.caption for s in shown]
        frames = zip(*([to_pil(frame) for frame in s.frames] for s in shown))
        return [
            contact_sheet(pictures, captions, headline, self.columns, self.tile, caption_font(self.font))
            for pictures in frames
        ]


class _Shown:
    """One sample of an evaluation; its rewards are looked up late, since rewards may run after the logger."""

    def __init__(self, rollout: Rollout, row: int) -> None:
        media = rollout.media[row].detach().float().nan_to_num(0.5).cpu()
        self.frames: Tensor = media if media.ndim == 4 else media[None]
        self.fps = rollout.fps or DEFAULT_FPS
        self.prompt = rollout.prompts[row]
        self.rewards = rollout.rewards
        self.row = row

    @property
    def caption(self) -> str:
        scores = [f"{name} {values[self.row].item():.3g}" for name, values in self.rewards.items() if "/" not in name]
        return "\n".join([" ".join(self.prompt.split()), *scores])


def _progress(trainer: Any) -> str:
    if trainer.state.fn != "fit":
        return "test" if trainer.testing else "validation"
    if trainer.sanity_checking:
        return "before training"
    return f"round {trainer.current_epoch + 1} of {trainer.max_epochs}, update {trainer.global_step}"


def _add_to_tensorboard(logger: TensorBoardLogger, tag: str, frames: list[Image.Image], fps: float, step: int) -> None:
    if len(frames) == 1:
        logger.experiment.add_image(tag, pil_to_tensor(frames[0]), step)
        return
    # `add_video` needs moviepy, and writes nothing without it; TensorBoard shows an animated GIF as what it is.
    width, height = frames[0].size
    image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=gif(frames, fps))
    logger.experiment._get_file_writer().add_summary(Summary(value=[Summary.Value(tag=tag, image=image)]), step)
