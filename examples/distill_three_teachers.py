"""Three teachers, one for colours and shapes, one for numbers, one for positions, and one student that learns from all.

    python examples/distill_three_teachers.py

The same as ``lit-diffrl fit --config configs/<name>.yaml`` for the three teachers and then for ``opd_shapes``, except
that the teachers train at the same time, as many as there are cores. Takes about eight minutes of CPU time.
Options are handed to the student: ``--seed_everything 1``, say.
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lit_diffrl.cli import main

CONFIGS = Path(__file__).parents[1] / "configs"
TEACHERS = ("teacher_colour_shapes", "teacher_count_shapes", "teacher_position_shapes")


def train(teacher: str) -> None:
    """Run one teacher in a process of its own; its output goes to a file."""
    log = Path("runs/teachers") / f"{teacher}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    print(f"training {teacher}: see {log}", flush=True)
    command = [sys.executable, "-m", "lit_diffrl", "fit", f"--config={CONFIGS / teacher}.yaml"]
    with log.open("w") as file:
        subprocess.run(command, check=True, stdout=file, stderr=subprocess.STDOUT)


if __name__ == "__main__":
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(train, TEACHERS))
    main(["fit", f"--config={CONFIGS / 'opd_shapes'}.yaml", *sys.argv[1:]])
