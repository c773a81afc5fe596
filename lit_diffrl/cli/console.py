"""What the command prints, and what it keeps others from printing."""

import logging
import sys
import warnings

from lightning.pytorch.utilities.rank_zero import rank_zero_module, rank_zero_only


@rank_zero_only
def say(message: str) -> None:
    """One line to the user, from the first rank alone."""
    print(f"lit-diffrl: {message}", file=sys.stderr, flush=True)


def quiet() -> None:
    """Drop lines of Lightning and torch about each other that a user can do nothing about."""
    for message in (
        r"`isinstance\(treespec, LeafSpec\)` is deprecated",
        r"torch\.distributed\.nn\.functional\.all_gather is deprecated",
        r"\s*``instantiate_classes`` was deprecated",
        r"`torch_dtype` is deprecated",
        r"The dirpath has changed from",  # every run has a directory of its own
        r"Be aware that when using `ckpt_path`.*: \['Report'\]\.$",
        r"Precision \S+ is not supported by the model summary",
        r"Found \d+ module\(s\) in eval mode at the start of training",  # the frozen parts of a pipeline
    ):
        warnings.filterwarnings("ignore", message=message)
    rank_zero_module.log.addFilter(_is_news)
    # Neither the file that warns nor its line of code says anything to a user.
    warnings.formatwarning = lambda message, category, *_: f"{category.__name__}: {message}\n"


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a line of Lightning's is neither an advertisement nor about hardware that next to nobody has."""
    return not any(words in record.getMessage() for words in ("Tip: For seamless cloud", "TPU available: False"))
