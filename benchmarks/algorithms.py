"""All algorithms on the embedded model, side by side: same start, same prompts, same reward, several seeds.

    python benchmarks/algorithms.py --out docs/benchmark            # under an hour on two cores
    python benchmarks/algorithms.py --quick --out runs/benchmark    # minutes

Every recipe runs as ``lit-diffrl fit --config configs/<name>.yaml`` does, in one thread, the seeds interleaved. CPU
seconds are those of the process without start-up and evaluation; rows are samples (or their parts) that went through
the transformer, forwards including the rollouts. Writes a Markdown table and a plot, and keeps the notes of the runs
in ``--runs``: what is there is not run again.
"""

import argparse
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean as average
from statistics import median, stdev

from clock import SCORES, fit, gain, mean, reach

BASELINE = "flow_grpo"
ALGORITHMS = (
    BASELINE,
    "flow_grpo_fast",
    "flow_grpo_cfg",
    "dance_grpo",
    "mix_grpo",
    "grpo_guard",
    "cps",
    "jagg",
    "flash_grpo",
    "rvm",
    "nft",
    "awm",
)
TARGETS = (0.85, 0.90)
AXES = {"cpu": "CPU seconds of training", "forward_rows": "rows forward", "backward_rows": "rows backward"}
QUICK = ("--trainer.max_epochs=10",)
Results = dict[str, dict[int, list[dict]]]


def table(results: Results) -> str:
    """Ends: scores averaged over seeds, and what was spent."""
    lines = [
        "| recipe | soft | strict | worst gain in soft, in its SE | CPU s | update phase | k forward | k backward |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|")
    for name, seeds in results.items():
        runs = list(seeds.values())
        cells = []
        for score in SCORES:
            ends = [mean(rows[-1], score) for rows in runs]
            spread = f" ± {stdev(ends):.3f}" if len(ends) > 1 else ""
            cells.append(f"{mean(runs[0][0], score):.3f} → {average(ends):.3f}{spread}")
        gains = [gain(rows, "soft") for rows in runs]
        worst = min(gains, key=lambda g: g[2] / g[3])
        cells.append(f"{worst[2]:+.3f}, {worst[2] / worst[3]:.1f}")
        last = [rows[-1] for rows in runs]
        cells.append(f"{average(r['cpu'] for r in last):.0f}")
        cells.append(f"{average(r['update_phase'] / r['cpu'] for r in last):.0%}")
        cells += [f"{average(r[k] for r in last) / 1e3:.0f}" for k in ("forward_rows", "backward_rows")]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def thresholds(results: Results) -> str:
    """What was spent until a soft score was reached: medians over seeds, and ratios to the baseline."""
    heads = [f"soft {t}: {label}" for t in TARGETS for label in ("CPU s", "k forward", "k backward")]
    lines = ["| recipe | " + " | ".join(heads) + " |", "|---|" + "---|" * len(heads)]
    spent = {
        (name, target, axis): [reach(rows, "soft", target, axis) for rows in seeds.values()]
        for name, seeds in results.items()
        for target in TARGETS
        for axis in AXES
    }
    for name in results:
        cells = []
        for target in TARGETS:
            for axis in AXES:
                ours, base = spent[name, target, axis], spent.get((BASELINE, target, axis), [None])
                if None in ours:
                    cells.append(f"{sum(x is not None for x in ours)} of {len(ours)} seeds")
                    continue
                ratio = f" ({median(ours) / median(base):.2f})" if None not in base else ""
                cells.append(f"{median(ours) / (1 if axis == 'cpu' else 1e3):.0f}{ratio}")
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(results: Results, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    figure, axes = plt.subplots(len(SCORES), len(AXES), figsize=(14, 8), sharey="row", sharex="col")
    colors = plt.get_cmap("tab20").colors
    for row, score in enumerate(SCORES):
        for column, (axis, label) in enumerate(AXES.items()):
            panel = axes[row, column]
            for i, (name, seeds) in enumerate(results.items()):
                spent = np.mean([[r[axis] for r in rows] for rows in seeds.values()], 0)
                scores = np.array([[mean(r, score) for r in rows] for rows in seeds.values()])
                style = {"color": colors[2 * i % 20 + i // 10], "label": name, "linewidth": 1.6}
                panel.plot(spent if axis == "cpu" else spent / 1e3, scores.mean(0), **style)
                panel.fill_between(
                    spent if axis == "cpu" else spent / 1e3,
                    scores.min(0),
                    scores.max(0),
                    color=style["color"],
                    alpha=0.08,
                    linewidth=0,
                )
            panel.grid(alpha=0.3)
            if row == len(SCORES) - 1:
                panel.set_xlabel(label if axis == "cpu" else f"thousand {label}")
            if column == 0:
                panel.set_ylabel(f"held-out PromptMatch, {score}")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="center right", frameon=False)
    figure.suptitle("Mean over seeds; shaded from the least to the greatest")
    figure.tight_layout(rect=(0, 0, 0.87, 1))
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--every", type=int, default=5, help="rounds between evaluations")
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time, one core each")
    parser.add_argument("--quick", action="store_true", help="one seed, ten rounds")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmark"), help="folder of the table and the plot")
    parser.add_argument("--runs", type=Path, default=Path("runs/benchmark"), help="folder of the notes")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    args.runs.mkdir(parents=True, exist_ok=True)
    seeds = args.seeds[:1] if args.quick else args.seeds
    kind = "quick" if args.quick else "full"
    options = (f"--trainer.check_val_every_n_epoch={args.every}", *(QUICK if args.quick else ()))
    plan = [(name, seed) for seed in seeds for name in args.algorithms]

    def run(job: tuple[str, int]) -> list[dict]:
        name, seed = job
        rows = fit(f"{name}_shapes", seed, args.runs / f"{name}_{seed}_{kind}.jsonl", args.runs / "runs", *options)
        print(f"{name}, seed {seed}: soft {mean(rows[0], 'soft'):.3f} → {mean(rows[-1], 'soft'):.3f}", flush=True)
        return rows

    with ThreadPoolExecutor(args.jobs) as pool:
        done = dict(zip(plan, pool.map(run, plan)))
    results = {name: {seed: done[name, seed] for seed in seeds} for name in args.algorithms}
    text = f"{table(results)}\n\n{thresholds(results)}\n"
    (args.out / "algorithms.md").write_text(text)
    plot(results, args.out / "algorithms.png")
    print(text)


if __name__ == "__main__":
    main()
