"""What JAGG's interpolation costs in accuracy and saves in time, against exact gradients of the same transitions.

    python benchmarks/jagg.py --out docs/benchmark       # about ten minutes on two cores

1. Fidelity: at the start of training, the cosine and relative error of its gradient against the exact one, for single
   groups of W = 4 steps by their place in a trajectory of 20 steps, and for the gradient of the whole update.
2. Cost: CPU seconds of the update phase, against Flow-GRPO on the same steps, side by side in one process.
3. Curves: held-out reward of ``jagg_shapes`` with and without interpolation, same seeds.
"""

import argparse
import logging
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean as average
from statistics import stdev

import lightning as L
import torch
from clock import fit, mean
from torch.nn.functional import cosine_similarity

from lit_diffrl import JAGG, FlowGRPO, RolloutDataModule, SD3Policy
from lit_diffrl.callbacks import PromptMatch

STEPS, WINDOW, RANGE = 20, 4, (0, 16)
KERNELS = (("dance", 0.1), ("dance", 0.3), ("flow", 0.3), ("flow", 0.5), ("flow", 0.7))


class Frozen(torch.optim.SGD):
    def __init__(self, params: object) -> None:
        super().__init__(params, lr=0.0)


class Compared(JAGG):
    """Compares every group with its exact gradient."""

    def diagnose(self, flat, signals, sigma):
        self.cosines, self.errors, exact_sum, sum_of_ours = {}, [], 0.0, 0.0
        for group in signals.flatten(1).any(1).nonzero().flatten().tolist():  # groups with an advantage
            exact, ours = self.gradients(flat, signals, sigma, group)
            exact_sum, sum_of_ours = exact_sum + exact, sum_of_ours + ours
            cosine, error = compare(exact, ours)
            self.cosines.setdefault(round(sigma[group, 0].item(), 2), []).append(cosine)
            self.errors.append(error)
        self.total = compare(exact_sum, sum_of_ours)
        return {}


def compare(exact: torch.Tensor, ours: torch.Tensor) -> tuple[float, float]:
    return cosine_similarity(exact, ours, dim=0).item(), ((ours - exact).norm() / exact.norm()).item()


def trainer(**options: object) -> L.Trainer:
    plain = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return L.Trainer(accelerator="cpu", enable_model_summary=False, limit_val_batches=0, **plain, **options)


def data(prompts: int, **options: object) -> RolloutDataModule:
    sizes = {"prompts_per_round": prompts, "group_size": 8, "rollout_batch_size": 128}
    return RolloutDataModule("embedded:shapes/train.jsonl", seed=0, **sizes, **options)


def fidelity() -> str:
    places, lines = None, []
    for kernel, eta in KERNELS:
        module = Compared(
            SD3Policy("embedded:shapes"),
            num_steps=STEPS,
            window_range=RANGE,
            window=WINDOW,
            kernel=kernel,
            eta=eta,
            step_weight="inverse_gain",
            diagnose_every=1,
            optimizer=Frozen,
        )
        run = trainer(max_epochs=1, callbacks=[PromptMatch(mode="mean")])
        run.fit(module, datamodule=data(8, batch_size=256))
        if places is None:
            places = sorted(module.cosines, reverse=True)
            heads = ["kernel, eta", "whole update: cosine", "error", "single groups: cosine", "error"]
            heads += [f"from t = {p}" for p in places]
            lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
        every = [c for cosines in module.cosines.values() for c in cosines]
        cells = [*module.total, average(every), average(module.errors)]
        cells += [average(module.cosines[p]) for p in places]
        lines.append(f"| `{kernel}`, {eta} | {' | '.join(f'{c:.3f}' for c in cells)} |")
        print(lines[-1], flush=True)
    return "\n".join(lines)


class UpdatePhase(L.Callback):
    """CPU seconds of each round's update phase."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_rollout_end(self, *_: object) -> None:
        self.start = time.process_time()

    def on_train_epoch_end(self, *_: object) -> None:
        self.seconds.append(time.process_time() - self.start)


def cost(rounds: int = 4) -> str:
    """The two take turns, so that what else the machine does hits both."""
    shared = {"num_steps": STEPS, "window_range": RANGE, "kernel": "flow", "eta": 0.5, "step_weight": "inverse_gain"}
    seconds, rows = {"exact": [], "JAGG": []}, {}
    for _ in range(rounds):
        modules = {
            "exact": (FlowGRPO(SD3Policy("embedded:shapes"), **shared), 128),
            "JAGG": (JAGG(SD3Policy("embedded:shapes"), window=WINDOW, diagnose_every=0, **shared), 64),
        }
        for name, (module, batch_size) in modules.items():  # 128 rows through the network at once in both
            clock = UpdatePhase()
            trainer(max_epochs=1, callbacks=[PromptMatch(mode="mean"), clock]).fit(
                module, datamodule=data(16, batch_size=batch_size)
            )
            seconds[name] += clock.seconds
            rows[name] = module.backward_rows
    ratios = [a / b for a, b in zip(seconds["exact"], seconds["JAGG"])]
    costs = ", ".join(f"{k} {average(s):.2f} ({rows[k]} rows backward)" for k, s in seconds.items())
    return (
        f"Update phase of a round of 128 samples, CPU seconds, mean of {rounds} turns: {costs}: {average(ratios):.2f} "
        f"times cheaper (least {min(ratios):.2f}, greatest {max(ratios):.2f})."
    )


def curves(seeds: list[int], runs: Path, jobs: int) -> str:
    kinds = {"JAGG": (), "exact": ("--model.jagg_frac=0",)}
    plan = [(kind, seed) for seed in seeds for kind in kinds]
    with ThreadPoolExecutor(jobs) as pool:

        def run(job: tuple[str, int]) -> list[dict]:
            kind, seed = job
            return fit("jagg_shapes", seed, runs / f"jagg_{kind}_{seed}.jsonl", runs, *kinds[kind])

        notes = dict(zip(plan, pool.map(run, plan)))
    lines = ["| round | JAGG, soft | exact, soft | difference ± standard error over seeds |", "|---|---|---|---|"]
    for i, row in enumerate(notes["JAGG", seeds[0]]):
        ours, theirs = ([mean(notes[kind, s][i], "soft") for s in seeds] for kind in kinds)
        gaps = [a - b for a, b in zip(ours, theirs)]
        error = stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else float("nan")
        lines.append(
            f"| {row['round']} | {average(ours):.3f} | {average(theirs):.3f} | {average(gaps):+.3f} ± {error:.3f} |"
        )
    spent = {kind: [notes[kind, s][-1] for s in seeds] for kind in kinds}
    whole = average(r["cpu"] for r in spent["exact"]) / average(r["cpu"] for r in spent["JAGG"])
    phase = average(r["update_phase"] for r in spent["exact"]) / average(r["update_phase"] for r in spent["JAGG"])
    lines += ["", f"Whole run: {whole:.2f} times cheaper; its update phases, off-policy updates included: {phase:.2f}."]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time, one core each")
    parser.add_argument("--out", type=Path, default=Path("runs/jagg"), help="folder of the tables")
    parser.add_argument("--runs", type=Path, default=Path("runs/jagg"), help="folder of the notes and runs")
    args = parser.parse_args()
    for folder in (args.out, args.runs):
        folder.mkdir(parents=True, exist_ok=True)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    parts = [fidelity(), cost(), curves(args.seeds, args.runs.resolve(), args.jobs)]
    text = "\n\n".join(parts) + "\n"
    (args.out / "jagg.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
