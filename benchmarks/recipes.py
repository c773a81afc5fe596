"""How the recipes of the embedded model climb, side by side: held-out reward, CPU seconds, rows through the network.

    python benchmarks/recipes.py --seeds 0 1 2 --out docs/recipes

Every recipe runs as ``lit-diffrl fit --config configs/<name>.yaml`` does, one after the other and the seeds
interleaved, in one thread. CPU seconds are those of the process without start-up and evaluation. Writes a Markdown
table, the raw figures as JSON lines, and a plot.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import lightning as L
from lightning.pytorch import Callback

RECIPES = ("flow_grpo_shapes", "rvm_shapes", "nft_shapes")
SCORES = {"soft": "match/soft", "strict": "match/strict"}


class Clock(Callback):
    """Notes CPU seconds, rows and held-out scores at every validation.

    Args:
        path: a file of JSON lines.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.evaluating = self.started = self.cpu = 0.0

    def on_sanity_check_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.evaluating = time.process_time()

    def on_sanity_check_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.note(trainer, module)
        self.started = time.process_time()

    def on_validation_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        self.cpu += time.process_time() - self.started
        self.evaluating = time.process_time()

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            self.note(trainer, module)
            self.started = time.process_time()

    def note(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        row = {
            "round": trainer.current_epoch + (not trainer.sanity_checking),
            "cpu": self.cpu,
            "evaluation": time.process_time() - self.evaluating,
            "forward_rows": module.forward_rows,
            "backward_rows": module.backward_rows,
            **{name: module.scores[key].tolist() for name, key in SCORES.items()},
        }
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def run(recipe: str, seed: int, folder: Path, every: int) -> list[dict]:
    path = folder / f"{recipe}_{seed}.jsonl"
    if not path.exists():
        clock = f"--trainer.callbacks+={Path(__file__).stem}.Clock"
        options = [
            f"--seed_everything={seed}",
            f"--trainer.check_val_every_n_epoch={every}",
            "--omit_callbacks=[SampleLogger]",
        ]
        where = [
            clock,
            f"--trainer.callbacks.path={path.resolve()}.part",
            f"--trainer.default_root_dir={folder / 'runs'}",
        ]
        command = [sys.executable, "-m", "lit_diffrl", "fit", f"--config=configs/{recipe}.yaml", *options, *where]
        here = str(Path(__file__).parent)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": here}
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        Path(f"{path}.part").rename(path)
    return [json.loads(line) for line in path.read_text().splitlines()]


def gain(rows: list[dict], score: str) -> tuple[float, float, float, float]:
    """Before, after, difference and its paired standard error over prompts."""
    import numpy as np

    before, after = np.array(rows[0][score]), np.array(rows[-1][score])
    difference = after - before
    return before.mean(), after.mean(), difference.mean(), difference.std(ddof=1) / len(difference) ** 0.5


def seconds_to(rows: list[dict], score: str, target: float) -> float | None:
    """CPU seconds until the mean held-out score first reaches a target, interpolated between evaluations."""
    points = [(row["cpu"], sum(row[score]) / len(row[score])) for row in rows]
    for (t0, s0), (t1, s1) in pairwise(points):
        if s1 >= target:
            return t0 if s0 >= target else t0 + (t1 - t0) * (target - s0) / (s1 - s0)
    return None


def table(results: dict[str, dict[int, list[dict]]]) -> str:
    lines = [
        "| recipe | seed | soft before → after | strict before → after | rounds | CPU s | k forward | k backward |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|")
    for recipe, seeds in results.items():
        for seed, rows in seeds.items():
            cells = []
            for score in SCORES:
                before, after, difference, error = gain(rows, score)
                cells.append(
                    f"{before:.3f} → {after:.3f} ({difference:+.3f} ± {error:.3f}, {difference / error:.1f} SE)"
                )
            last = rows[-1]
            counts = f"{last['forward_rows'] / 1e3:.0f} | {last['backward_rows'] / 1e3:.0f}"
            lines.append(
                f"| `{recipe}` | {seed} | {' | '.join(cells)} | {last['round']} | {last['cpu']:.0f} | {counts} |"
            )
    lines += ["", "CPU seconds to the soft score that Flow-GRPO ends with, per seed, and as a ratio to Flow-GRPO:", ""]
    lines += ["| recipe | " + " | ".join(f"seed {s}" for s in results[RECIPES[0]]) + " |"]
    lines += ["|---|" + "---|" * len(results[RECIPES[0]])]
    for recipe, seeds in results.items():
        cells = []
        for seed, rows in seeds.items():
            final = results[RECIPES[0]][seed]
            target = sum(final[-1]["soft"]) / len(final[-1]["soft"])
            base, ours = seconds_to(final, "soft", target), seconds_to(rows, "soft", target)
            cells.append("not reached" if ours is None or base is None else f"{ours:.0f} s ({ours / base:.2f})")
        lines.append(f"| `{recipe}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(results: dict[str, dict[int, list[dict]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharex=True)
    for axis, score in zip(axes, SCORES):
        for color, (recipe, seeds) in zip(("tab:blue", "tab:orange", "tab:green"), results.items()):
            for i, rows in enumerate(seeds.values()):
                means = [sum(row[score]) / len(row[score]) for row in rows]
                label = recipe.removesuffix("_shapes") if i == 0 else None
                axis.plot([row["cpu"] for row in rows], means, color=color, alpha=0.8, label=label)
        axis.set_xlabel("CPU seconds of training, one thread")
        axis.set_ylabel(f"held-out PromptMatch, {score}")
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--every", type=int, default=10, help="rounds between evaluations")
    parser.add_argument("--out", type=Path, default=Path("runs/recipes"), help="folder of the results")
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[int, list[dict]]] = {recipe: {} for recipe in args.recipes}
    for seed in args.seeds:
        for recipe in args.recipes:
            results[recipe][seed] = run(recipe, seed, args.out, args.every)
            print(f"{recipe}, seed {seed}: done", flush=True)
    text = table(results)
    (args.out / "recipes.md").write_text(text + "\n")
    plot(results, args.out / "recipes.png")
    print(text)


if __name__ == "__main__":
    main()
