"""Every recipe runs through the command, all weights trained and with LoRA."""

from pathlib import Path

import pytest
import torch

from lit_diffrl.cli import main

CONFIGS = Path(__file__).parents[2] / "configs"
TEACHERS = {
    "colour_shape": "teacher_colour_shapes",
    "count": "teacher_count_shapes",
    "position": "teacher_position_shapes",
}
DISTILLATION = ("opd_shapes", "reinforce_opd_shapes")
TINY = [
    "--trainer.max_epochs=1",
    "--trainer.limit_val_batches=0",
    "--omit_callbacks=[RichRolloutProgressBar,Report,SampleLogger]",
    "--data.prompts_per_round=4",
    "--data.rollout_batch_size=8",
    "--data.batch_size=8",
    "--data.updates_per_round=2",
]
LORA = ["--model.policy.lora.rank=2", "--model.policy.lora.alpha=4"]


def fit(recipe: str, *options: str) -> dict:
    """The last checkpoint of a short run."""
    main(["fit", "-c", str(CONFIGS / f"{recipe}.yaml"), *TINY, *options])
    (path,) = Path().rglob("last.ckpt")
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize("lora", [[], LORA], ids=["full", "lora"])
@pytest.mark.parametrize(
    "recipe", sorted(p.stem for p in CONFIGS.glob("*.yaml") if p.stem not in (*DISTILLATION, *TEACHERS.values()))
)
def test_a_recipe_trains(recipe, lora, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoint = fit(recipe, "--data.group_size=2", *lora)
    assert checkpoint["global_step"] == 2
    assert any(".lora_" in k for k in checkpoint["state_dict"]) == bool(lora)


@pytest.fixture(scope="module")
def teachers(tmp_path_factory):
    """The folder in which three teachers have been trained, one of them with LoRA."""
    folder = tmp_path_factory.mktemp("teachers")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for recipe, more in zip(TEACHERS.values(), ([], LORA, [])):
            main(["fit", "-c", str(CONFIGS / f"{recipe}.yaml"), *TINY, "--data.group_size=2", *more])
    return folder / "runs" / "teachers"


@pytest.mark.parametrize("lora", [[], LORA], ids=["full", "lora"])
@pytest.mark.parametrize("recipe", DISTILLATION)
def test_a_student_learns_from_the_three_teachers(recipe, lora, teachers, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    where = [f"--model.teachers.{source}={teachers / source}" for source in TEACHERS]
    checkpoint = fit(recipe, *where, *lora)
    assert checkpoint["global_step"] == 2
    assert not any("teacher" in k for k in checkpoint["state_dict"])
