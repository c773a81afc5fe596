import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from tests import tiny

# The tiny models are many times slower with contended threads, and forked ranks must not inherit a thread pool.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def sd35_folder(tmp_path_factory):
    return tiny.save(tiny.sd3_pipeline(), tmp_path_factory.mktemp("sd35"))


@pytest.fixture
def prompt_file(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("a red fox\na blue bird\na green frog\na gold fish\na grey wolf\na white cat\n")
    return path
