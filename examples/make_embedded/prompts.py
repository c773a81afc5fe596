"""The prompt files: held-out prompts for validation and test, and the prompts that reinforcement learning sees."""

import json
import random
from pathlib import Path

from world import by_kind

from lit_diffrl.callbacks.rewards.composition import KINDS, Composition, caption

HELD_OUT_PROMPTS = 256
TRAIN_PROMPTS = 2000
_TRAIN_SHARES = {"single": 0.012, "count": 0.033, "pair": 0.4775, "relation": 0.4775}  # about the held-out mixture


def held_out(part: str) -> list[Composition]:
    """256 distinct compositions of 'val' or 'test': a fair share of each kind, or all of a kind that has fewer."""
    table, rng = by_kind(part), random.Random(f"{part} prompts")
    chosen: list[Composition] = []
    kinds = sorted(KINDS, key=lambda kind: len(table[kind]))
    for rank, kind in enumerate(kinds):
        share = (HELD_OUT_PROMPTS - len(chosen)) // (len(kinds) - rank)
        chosen += rng.sample(table[kind], min(share, len(table[kind])))
    rng.shuffle(chosen)
    return chosen


def training() -> list[Composition]:
    """Up to 2000 distinct training compositions in about the mixture of the held-out ones."""
    table, rng = by_kind("train"), random.Random("train prompts")
    chosen = [
        composition
        for kind, share in _TRAIN_SHARES.items()
        for composition in rng.sample(table[kind], min(round(share * TRAIN_PROMPTS), len(table[kind])))
    ]
    rng.shuffle(chosen)
    return chosen


def write(directory: Path) -> None:
    """Writes train.jsonl, val.jsonl and test.jsonl with rows {"prompt": ..., "source": kind}."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, chosen in (("train", training()), ("val", held_out("val")), ("test", held_out("test"))):
        rows = (json.dumps({"prompt": caption(c), "source": c.kind}) for c in chosen)
        (directory / f"{name}.jsonl").write_text("".join(row + "\n" for row in rows))
