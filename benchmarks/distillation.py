"""Three teachers distilled into one student, against one run on all three rewards and against policy gradients.

    python benchmarks/distillation.py --out docs/benchmark      # about a quarter of an hour on two cores

For each seed: the three teachers, the student (DiffusionOPD), the same with policy gradients (ReinforceOPD), and one
DiffusionNFT run on all three tasks that is given the teachers' CPU time together. Each task is scored by its own
reward on its own held-out prompts. Writes a Markdown table.
"""

import argparse
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean as average

from clock import fit, mean

TASKS = {
    "colour_shape": "teacher_colour_shapes",
    "count": "teacher_count_shapes",
    "position": "teacher_position_shapes",
}
STUDENTS = ("opd_shapes", "reinforce_opd_shapes")
MULTI = "nft_tasks_shapes"
SCORES = ["--trainer.callbacks.scores={" + ", ".join(f"{task}: {task}" for task in TASKS) + "}"]


def run_seed(seed: int, runs: Path, pool: ThreadPoolExecutor) -> dict[str, list[dict]]:
    def teach(task: str) -> list[dict]:
        logger = f"--trainer.logger.save_dir={runs / f'teachers_{seed}'}"
        return fit(TASKS[task], seed, runs / f"{task}_{seed}.jsonl", runs, *SCORES, logger)

    done = dict(zip(TASKS, pool.map(teach, TASKS)))
    budget = sum(rows[-1]["cpu"] for rows in done.values())

    def learn(config: str) -> list[dict]:
        paths = [f"--model.teachers.{task}={runs / f'teachers_{seed}' / task}" for task in TASKS]
        return fit(config, seed, runs / f"{config}_{seed}.jsonl", runs, *SCORES, *paths)

    def multi(_: str) -> list[dict]:
        limit = f"--trainer.callbacks.budget={budget}"
        return fit(MULTI, seed, runs / f"{MULTI}_{seed}.jsonl", runs, *SCORES, limit, "--trainer.max_epochs=100000")

    jobs = [pool.submit(multi, MULTI), *(pool.submit(learn, config) for config in STUDENTS)]
    return done | dict(zip((MULTI, *STUDENTS), (job.result() for job in jobs)))


def table(results: dict[int, dict[str, list[dict]]]) -> str:
    heads = ["seed", "run", *TASKS, "mean", "CPU s", "CPU s / slowest teacher"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for seed, runs in results.items():
        slowest = max(runs[task][-1]["cpu"] for task in TASKS)
        teachers = {task: mean(runs[task][-1], task) for task in TASKS}
        base = {task: mean(runs["opd_shapes"][0], task) for task in TASKS}
        budget = sum(runs[task][-1]["cpu"] for task in TASKS)
        lines.append(line(seed, "before", base, None, None))
        lines.append(line(seed, "each task's own teacher", teachers, budget, None))
        for name in (*STUDENTS, MULTI):
            last = runs[name][-1]
            scores = {task: mean(last, task) for task in TASKS}
            shares = {task: scores[task] / teachers[task] for task in TASKS}
            lines.append(line(seed, f"`{name}`", scores, last["cpu"], last["cpu"] / slowest, shares))
    return "\n".join(lines) + "\n"


def line(
    seed: int,
    name: str,
    scores: dict[str, float],
    cpu: float | None,
    share: float | None,
    of_teacher: dict[str, float] | None = None,
) -> str:
    cells = [f"{scores[t]:.3f}" + (f" ({of_teacher[t]:.0%})" if of_teacher else "") for t in TASKS]
    cells += [f"{average(scores.values()):.3f}", "" if cpu is None else f"{cpu:.0f}"]
    return f"| {seed} | {name} | {' | '.join(cells)} | {'' if share is None else f'{share:.2f}'} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time, one core each")
    parser.add_argument("--out", type=Path, default=Path("runs/distillation"), help="folder of the table")
    parser.add_argument("--runs", type=Path, default=Path("runs/distillation"), help="folder of the notes and runs")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    args.runs.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(args.jobs) as pool:
        results = {seed: run_seed(seed, args.runs.resolve(), pool) for seed in args.seeds}
    text = table(results)
    (args.out / "distillation.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
