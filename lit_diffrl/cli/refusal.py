"""Telling settings that a class refuses, of which the message is enough, from errors whose traceback is needed."""

import traceback
from types import FrameType

from lightning.pytorch.utilities.exceptions import MisconfigurationException

_SETTING_UP = {
    "__init__",
    "__post_init__",
    "setup",
    "configure_model",
    "export",
    "instantiate_trainer",
    "on_load_checkpoint",
}


def unwrap(error: Exception) -> Exception:
    """What a class raised, without the parser's account of all alternatives around it."""
    while isinstance(error.__cause__, Exception) and _module(_frames(error)[-1]) == "jsonargparse":
        error = error.__cause__
    return error


def is_refusal(error: Exception) -> bool:
    """Whether a class of ours or Lightning's refused its settings before the run began."""
    if not isinstance(error, (ValueError, OSError, MisconfigurationException)):
        return False
    frames = _frames(error)
    setting_up = any(
        f.f_code.co_name in _SETTING_UP and f.f_code.co_qualname != "LightningCLI.__init__" for f in frames
    )
    return setting_up and _module(frames[-1]) in ("lit_diffrl", "lightning")


def _frames(error: Exception) -> list[FrameType]:
    return [frame for frame, _ in traceback.walk_tb(error.__traceback__)]


def _module(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "").partition(".")[0]
