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


def by_task(compositions: list[Composition]) -> list[tuple[Composition, str]]:
    """The same prompts by what is asked of them: relations for position, the others for colours and shapes or count.

    Pairs go to the two latter in turn, single objects to colours and shapes, several alike to count.
    """
    sources, pairs = [], 0
    for composition in compositions:
        pairs += composition.kind == "pair"
        task = {"relation": "position", "single": "colour_shape", "count": "count"}.get(composition.kind)
        sources.append(task or ("colour_shape", "count")[pairs % 2])
    return list(zip(compositions, sources))


def write(directory: Path) -> None:
    """Writes the prompt files, with rows {"prompt": ..., "source": ...}.

    train.jsonl, val.jsonl and test.jsonl have the kind as source; tasks_train.jsonl and tasks_val.jsonl have the same
    prompts by task, the latter those of both held-out files.
    """
    directory.mkdir(parents=True, exist_ok=True)
    parts = {"train": training(), "val": held_out("val"), "test": held_out("test")}
    files = {name: [(c, c.kind) for c in chosen] for name, chosen in parts.items()}
    files["tasks_train"], files["tasks_val"] = by_task(parts["train"]), by_task(parts["val"] + parts["test"])
    for name, rows in files.items():
        lines = (json.dumps({"prompt": caption(c), "source": source}) for c, source in rows)
        (directory / f"{name}.jsonl").write_text("".join(line + "\n" for line in lines))
