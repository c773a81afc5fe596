import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.distributed
def test_sharded_weights_are_averaged_saved_and_resumed(tmp_path):
    # The strategy starts its ranks by running the script again, hence not in this process.
    script, root = Path(__file__).with_name("sharded_ema.py"), Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, script, tmp_path], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    said = ast.literal_eval(next(line for line in run.stdout.splitlines() if line.startswith("{'seen'")))
    assert said["seen"][0] == [0] * 4 and said["seen"][-1] == pytest.approx([0.561] * 4, abs=1e-6)
    assert said["average"] == said["stored"] == pytest.approx([0.561] * 4, abs=1e-6)
    assert said["live"] == pytest.approx([3] * 4, abs=1e-6)
    assert said["resumed"]
