"""Samples as files: what ``predict`` makes."""

import json
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from PIL import Image

from lit_diffrl.callbacks.checks import check_media, flaws
from lit_diffrl.callbacks.encode import DEFAULT_FPS, gif, to_pil
from lit_diffrl.callbacks.sheet import caption_font, contact_sheet, fit
from lit_diffrl.rollouts import Rollout


class SampleWriter(BasePredictionWriter):
    """Writes the samples of ``predict``: ``00000.png`` or ``00000.gif`` each, numbered as in the prompt file.

    Beside them stand ``prompts.jsonl`` (``file``, ``prompt``, ``source``, ``seed`` and metadata of each) and
    ``grid.png``, a contact sheet with captions, of videos their middle frames. Existing files are overwritten. The
    module's ``predict_step`` must return a :class:`~lit_diffrl.rollouts.Rollout` with media.

    Args:
        output_dir: where to; the folder ``samples`` in the run's log folder where omitted.
        grid: samples in the contact sheet; 0 for none.
        columns: samples in a row of it.
        tile: px that the longer side of a sample takes in it; smaller samples are enlarged by whole factors.
        font: a TrueType file for prompts with other letters than those of English.
    """

    def __init__(
        self,
        output_dir: Path | None = None,
        grid: int = 64,
        columns: int = 8,
        tile: int = 256,
        font: Path | None = None,
    ) -> None:
        super().__init__("batch")
        for name, value, least in (("grid", grid, 0), ("columns", columns, 1), ("tile", tile, 1)):
            if value < least:
                raise ValueError(f"{name} of SampleWriter is {value}; it must be at least {least}")
        self.output_dir = output_dir
        self.grid = grid
        self.columns = columns
        self.tile = tile
        caption_font(font)  # a file that cannot be read is found here
        self.font = font
        self._folder = Path()
        self._records: dict[int, dict[str, Any]] = {}
        self._tiles: dict[int, Image.Image] = {}
        self._warned = False

    def on_predict_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Make the folder."""
        log_dir = trainer.log_dir  # a broadcast, hence on all ranks
        self._folder = (
            Path(self.output_dir)
            if self.output_dir is not None
            else Path(log_dir or trainer.default_root_dir) / "samples"
        )
        self._folder.mkdir(parents=True, exist_ok=True)
        self._records, self._tiles = {}, {}

    def write_on_batch_end(
        self,
        trainer: L.Trainer,
        module: L.LightningModule,
        prediction: Any,
        batch_indices: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Write each sample of a batch."""
        if not isinstance(prediction, Rollout):
            raise TypeError(
                f"SampleWriter: predict_step returned {type(prediction).__name__}; it must return a Rollout"
            )
        usable = check_media(prediction, "any", "SampleWriter")
        if not usable.all() and not self._warned:
            self._warned = True
            rank_zero_warn(
                f"SampleWriter: {flaws(prediction.media, usable)}; they are written all the same (said once)"
            )
        for i, number in enumerate(prediction.sample_ids.tolist()):
            if number >= 0:  # else it pads the batches of several ranks
                self._write(prediction, i, number)

    def on_predict_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Write the contact sheet and the list of prompts, of all ranks."""
        mine = (self._records, self._tiles)
        parts: list[Any] = [mine]
        if trainer.world_size > 1:
            parts = [None] * trainer.world_size
            torch.distributed.all_gather_object(parts, mine)
        if not trainer.is_global_zero:
            return
        records = {number: record for part, _ in parts for number, record in part.items()}
        tiles = {number: tile for _, part in parts for number, tile in part.items()}
        lines = [json.dumps(records[number], ensure_ascii=False) + "\n" for number in sorted(records)]
        (self._folder / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
        if tiles:
            order = sorted(tiles)
            captions = [f"{number}: {records[number]['prompt']}" for number in order]
            headline = f"{len(order)} of {len(records)} samples: {module.sampler_description}"
            sheet = contact_sheet(
                [tiles[n] for n in order], captions, headline, self.columns, self.tile, caption_font(self.font)
            )
            sheet.save(self._folder / "grid.png")
        rank_zero_info(f"{len(records)} samples are in {self._folder}")

    def _write(self, rollout: Rollout, row: int, number: int) -> None:
        media = rollout.media[row].nan_to_num(0.5)
        frames = [to_pil(frame) for frame in (media if media.ndim == 4 else media[None])]
        path = self._folder / f"{number:05d}.{'png' if media.ndim == 3 else 'gif'}"
        if media.ndim == 3:
            frames[0].save(path)
        else:
            path.write_bytes(gif(frames, rollout.fps or DEFAULT_FPS))
        fixed = {"file": path.name, "prompt": rollout.prompts[row], "source": rollout.sources[row]}
        self._records[number] = rollout.metadata[row] | fixed | {"seed": int(rollout.seeds[row])}
        if number < self.grid:
            self._tiles[number] = fit(frames[len(frames) // 2], self.tile)
