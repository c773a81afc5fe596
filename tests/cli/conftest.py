from pathlib import Path

import lightning  # noqa: F401  (its log handler keeps the stderr of this import: not that of a captured test)
import pytest
import yaml

from lit_diffrl.cli import main

BASE = """
trainer:
  max_epochs: 1
  accelerator: cpu
model:
  class_path: FlowGRPO
  init_args:
    clip: 0.25
    num_steps: 3
    policy:
      class_path: SD3Policy
      init_args:
        pretrained: embedded:shapes
        lora: {rank: 4, alpha: 8}
    optimizer: {class_path: AdamW, init_args: {lr: 1.0e-3}}
    lr_scheduler: {class_path: StepLR, init_args: {step_size: 1, gamma: 0.5}}
data:
  class_path: RolloutDataModule
  init_args:
    prompts: prompts.txt
    val_prompts: val.txt
    prompts_per_round: 1
    group_size: 3
    rollout_batch_size: 3
    batch_size: 3
rewards:
  plain: {class_path: JPEGCompressibility, init_args: {weight: 0.7}}
  rough: {class_path: JPEGIncompressibility, init_args: {weight: 0.3, quality: 50}}
"""


def write(folder: Path) -> None:
    (folder / "base.yaml").write_text(BASE)
    (folder / "prompts.txt").write_text("a red circle on black\na blue square on black\n")
    (folder / "val.txt").write_text("a green square on black\n")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A directory with a config, as the present one."""
    write(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def printed(capsys):
    """The resolved config of some arguments, and what was said meanwhile."""

    def resolve(*args: str, command: str = "fit") -> tuple[dict, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            main([command, *args, "--print_config"])
        assert exit_.value.code == 0
        out, err = capsys.readouterr()
        return yaml.safe_load(out), err

    return resolve


@pytest.fixture
def refused(capsys):
    """The message of arguments that are wrong."""

    def run(*args: str) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            main(list(args))
        assert exit_.value.code == 2
        return capsys.readouterr().err

    return run


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """The directory and the last checkpoint of a run of one round with an average."""
    folder = tmp_path_factory.mktemp("run")
    write(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        average = ["--trainer.callbacks+=EMA", "--trainer.callbacks.decay=0.5"]
        main(["fit", "-c", "base.yaml", "--seed_everything=5", *average])
        patch.delenv("PL_GLOBAL_SEED")
    (ckpt,) = folder.rglob("last.ckpt")
    return folder, str(ckpt)
