"""Loading diffusers pipelines from a hub id or a directory."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


def load_diffusers(pipeline: str, pretrained: str, dtype: torch.dtype, revision: str | None) -> Any:
    """A diffusers pipeline with its weights.

    Args:
        pipeline: name of the class in diffusers.
        pretrained: hub id or directory.
        dtype: of the weights.
        revision: of a hub id.

    Raises:
        OSError: if the model is neither here nor to be had, naming it and the setting.
    """
    import diffusers

    try:
        with _no_remarks(small=_megabytes(pretrained) < 100):
            return getattr(diffusers, pipeline).from_pretrained(pretrained, dtype=dtype, revision=revision)
    except OSError as e:
        raise OSError(
            f"policy.pretrained {pretrained!r} could not be loaded as a {pipeline}: {e}\n"
            "Give the directory of a downloaded pipeline, or a hub id that this machine can reach."
        ) from e


@contextmanager
def quiet(*loggers: str) -> Iterator[None]:
    """Let the named loggers report errors only."""
    levels = {name: logging.getLogger(name).level for name in loggers}
    try:
        for name in loggers:
            logging.getLogger(name).setLevel(logging.ERROR)
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


@contextmanager
def _no_remarks(small: bool) -> Iterator[None]:
    """No notice that a VAE is of another class than its annotation, which works; no bars for what loads at once."""
    from diffusers.utils import logging as of_diffusers
    from transformers.utils import logging as of_transformers

    bars = [m for m in (of_diffusers, of_transformers) if small and m.is_progress_bar_enabled()]
    for module in bars:
        module.disable_progress_bar()
    try:
        with quiet("diffusers.pipelines.pipeline_utils"):
            yield
    finally:
        for module in bars:
            module.enable_progress_bar()


def _megabytes(pretrained: str) -> float:
    """Size of a local pipeline; infinite for a hub id."""
    folder = Path(pretrained)
    return sum(f.stat().st_size for f in folder.rglob("*")) / 1e6 if folder.is_dir() else float("inf")
