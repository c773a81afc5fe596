"""Teachers: saved weights of every kind become a role of the student, and leave it as it was."""

import shutil
from pathlib import Path

import diffusers
import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from lit_diffrl import load_run
from lit_diffrl.cli import main
from lit_diffrl.policies import LoRA, SD3Policy
from lit_diffrl.policies.teachers import Teacher, add_teacher
from lit_diffrl.sampling.noise import randn
from tests import tiny

# Neither the rank nor the strength of the student.
THEIRS = {"rank": 3, "alpha": 9.0}
STUDENTS = {"full": None, "lora": LoRA(rank=2, alpha=4)}


def velocity(policy, role: str = "default"):
    size = policy.native_size()
    x = randn(policy.latent_shape(size), [3, 4])
    cond = policy.encode_prompts(["a red fox", "a blue bird"])
    with torch.no_grad(), policy.roles.use(role):
        return policy.velocity(x, torch.tensor([400.0, 900.0]), cond, size=size)


def loaded(folder: str, lora: LoRA | None, moved: int | None = None) -> SD3Policy:
    """A policy, at weights that ``moved`` names."""
    torch.manual_seed(moved or 0)
    policy = SD3Policy(folder, lora=lora)
    policy.load()
    for p in policy.parameters():
        if p.requires_grad and moved is not None:
            p.data += 0.1 * torch.randn_like(p)
    return policy


def cli(folder: Path, command: str, model: dict, *options: str) -> None:
    """A command of ``lit-diffrl`` in a folder, which has a file of prompts."""
    config = {
        "trainer": {"max_epochs": 1, "accelerator": "cpu", "limit_val_batches": 0},
        "omit_callbacks": ["RichRolloutProgressBar", "Report", "SampleLogger"],
        "model": model,
        "data": {
            "class_path": "RolloutDataModule",
            "init_args": {"prompts": "p.txt", "val_prompts": "p.txt", "prompts_per_round": 1, "group_size": 2},
        },
        "rewards": {"plain": {"class_path": "JPEGCompressibility"}},
    }
    (folder / "p.txt").write_text("a red fox\na blue bird\n")
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        main([command, "-c", "run.yaml", *options])
        patch.delenv("PL_GLOBAL_SEED", raising=False)


def learner(pretrained: str, name: str = "RVM", lora: dict | None = None, lr: float = 0.02, **options) -> dict:
    policy = {"class_path": "SD3Policy", "init_args": {"pretrained": pretrained, "lora": lora}}
    optimizer = {"class_path": "SGD" if name == "RVM" else "AdamW", "init_args": {"lr": lr}}
    return {"class_path": name, "init_args": {"num_steps": 2, "policy": policy, "optimizer": optimizer, **options}}


@pytest.fixture(scope="module")
def saved(sd35_folder, tmp_path_factory):
    """A kind of teacher -> its path, which of its weights, and the velocity that it must have."""
    folder, teachers = tmp_path_factory.mktemp("teachers"), {}
    adapted, whole = loaded(sd35_folder, LoRA(**THEIRS), 1), loaded(sd35_folder, None, 2)
    file, transformer = adapted.export(folder / "lora"), whole.export(folder / "whole")
    for name, path in (("lora_folder", file.parent), ("lora_file", file)):
        teachers[name] = path, "live", velocity(adapted)
    for name, path in (("transformer", transformer), ("holder_of_transformer", folder / "whole")):
        teachers[name] = path, "live", velocity(whole)
    for kind, lora in (("lora_run", THEIRS), ("full_run", None)):
        (folder / kind).mkdir()
        average = ["--trainer.callbacks+=EMA", "--trainer.callbacks.decay=0.5"]
        cli(folder / kind, "fit", learner(sd35_folder, lora=lora, lr=300.0), *average)
        (ckpt,) = folder.glob(f"{kind}/**/last.ckpt")
        for weights in ("live", "ema"):
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(folder / kind)  # where its prompts are
                expected = velocity(load_run(ckpt, weights)[0].policy)
            teachers[f"{kind}_{weights}"] = ckpt, weights, expected
        teachers[f"{kind}_folder"] = ckpt.parents[1], "live", teachers[f"{kind}_live"][2]
    return teachers


KINDS = ["lora_folder", "lora_file", "transformer", "holder_of_transformer"]
KINDS += [f"{run}_{what}" for run in ("lora_run", "full_run") for what in ("live", "ema", "folder")]


def test_the_saved_teachers_differ_from_the_model_and_from_each_other(saved, sd35_folder):
    assert sorted(saved) == sorted(KINDS)
    velocities = [saved[kind][2] for kind in KINDS if kind.split("_")[-1] in ("file", "transformer", "live", "ema")]
    velocities.append(velocity(loaded(sd35_folder, None)))
    distances = [(a - b).abs().max() for i, a in enumerate(velocities) for b in velocities[:i] if a is not b]
    assert sorted(distances)[1] > 1e-3  # two of them are the same transformer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lora", list(STUDENTS))
def test_a_teacher_is_what_was_saved_and_leaves_the_student_as_it_was(sd35_folder, saved, lora, kind):
    path, weights, expected = saved[kind]
    policy = loaded(sd35_folder, STUDENTS[lora])
    before, flags = velocity(policy), {k: p.requires_grad for k, p in policy.named_parameters()}
    tensors = {k: v.clone() for k, v in policy.trainable_state(policy.state_dict()).items()}
    add_teacher(policy, "teacher_0", Teacher(str(path), weights=weights))
    assert (velocity(policy, "teacher_0") - expected).abs().max() <= 1e-6
    assert torch.equal(velocity(policy), before)  # after the role was used, too
    now = dict(policy.named_parameters())
    assert {k: now[k].requires_grad for k in flags} == flags
    assert not any(p.requires_grad for k, p in now.items() if k not in flags)
    after = policy.trainable_state(policy.state_dict())
    assert after.keys() == tensors.keys() and all(torch.equal(after[k], v) for k, v in tensors.items())


@pytest.mark.parametrize("lora", list(STUDENTS))
def test_teachers_of_all_kinds_live_beside_each_other(sd35_folder, saved, lora):
    policy = loaded(sd35_folder, STUDENTS[lora])
    policy.roles.add("old")
    kinds = ["lora_file", "transformer", "lora_run_ema", "full_run_live"]
    for i, kind in enumerate(kinds):
        add_teacher(policy, f"teacher_{i}", Teacher(str(saved[kind][0]), weights=saved[kind][1]))
    before, student = velocity(policy, "old"), velocity(policy)
    for p in policy.parameters():  # none of them follows the student
        if p.requires_grad:
            p.data += 0.05
    for i, kind in enumerate(kinds):
        assert (velocity(policy, f"teacher_{i}") - saved[kind][2]).abs().max() <= 1e-6
    assert torch.equal(velocity(policy, "old"), before) and not torch.equal(velocity(policy), student)
    kept = policy.trainable_state(policy.state_dict())
    assert not any("teacher" in key for key in kept) and any("old" in key for key in kept)


@pytest.mark.parametrize("kind", ["lora_file", "lora_run_live"])
@pytest.mark.parametrize("lora", list(STUDENTS))
def test_an_adapter_sits_on_the_model_whatever_the_student_has_become(sd35_folder, saved, lora, kind):
    """As for a student that ``load_run`` brought, which is then trained on."""
    policy = loaded(sd35_folder, STUDENTS[lora], 5)
    add_teacher(policy, "teacher_0", Teacher(str(saved[kind][0])))
    assert (velocity(policy, "teacher_0") - saved[kind][2]).abs().max() <= 1e-6


@pytest.mark.parametrize("lora", list(STUDENTS))
def test_gradients_reach_the_student_alone(sd35_folder, saved, lora):
    policy = loaded(sd35_folder, STUDENTS[lora], 5)
    trained = {k for k, p in policy.named_parameters() if p.requires_grad}
    add_teacher(policy, "teacher_0", Teacher(str(saved["lora_file"][0])))
    target, size = velocity(policy, "teacher_0"), policy.native_size()
    x, cond = randn(policy.latent_shape(size), [3, 4]), policy.encode_prompts(["a red fox", "a blue bird"])
    v = policy.velocity(x, torch.tensor([400.0, 900.0]), cond, size=size)
    (v - target).square().mean().backward()
    # All of it, but for what the last block of the model has no use for.
    reached = {k for k, p in policy.named_parameters() if p.grad is not None and p.grad.any()}
    assert reached <= trained and len(reached) > 0.8 * len(trained)


# -- what does not fit -----------------------------------------------------------------------------------------------


@pytest.fixture
def adapter(saved, tmp_path):
    """Writes the tensors of the saved adapter after a change, with or without the configuration."""

    def write(change, config: bool = True) -> str:
        with safe_open(saved["lora_file"][0], "pt") as file:
            metadata = file.metadata() if config else None
        save_file(change(load_file(saved["lora_file"][0])), tmp_path / "changed.safetensors", metadata)
        return str(tmp_path / "changed.safetensors")

    return write


def first(state: dict, part: str) -> str:
    return next(k for k in state if part in k)


CHANGES = {
    "none fits": (lambda s: {f"base_model.model.{k}": v for k, v in s.items()}, "30 of its 30 tensors fit no layer"),
    "without prefix": (lambda s: {k.removeprefix("transformer."): v for k, v in s.items()}, "30 of its 30 tensors"),
    "a block that is not there": (
        lambda s: {k.replace("blocks.0", "blocks.7"): v for k, v in s.items()},
        "16 of its 30 tensors fit no layer, such as transformer.transformer_blocks.7",
    ),
    "a text encoder beside it": (
        lambda s: s | {"text_encoder.x.lora_A.weight": s[first(s, "lora_A")].clone()},
        "1 of its 31 tensors fit no layer, such as text_encoder",
    ),
    "one up-projection lacking": (lambda s: {k: v for k, v in s.items() if k != first(s, "lora_B")}, r"\b1 of"),
    "all up-projections lacking": (lambda s: {k: v for k, v in s.items() if "lora_B" not in k}, r"\b15 of"),
}


@pytest.mark.filterwarnings("ignore:While injecting the PEFT adapters")
@pytest.mark.parametrize("lora", list(STUDENTS))
@pytest.mark.parametrize("change", list(CHANGES))
def test_an_adapter_that_does_not_fit_is_refused_with_counts(sd35_folder, adapter, change, lora):
    alter, message = CHANGES[change]
    path, policy = adapter(alter), loaded(sd35_folder, STUDENTS[lora])
    with pytest.raises(ValueError, match=f"(?s)the teacher {path}: .*{message}"):
        add_teacher(policy, "teacher_0", Teacher(path))


@pytest.mark.parametrize("change", ["none fits", "a block that is not there", "one up-projection lacking"])
def test_an_adapter_without_its_configuration_is_held_to_the_same(sd35_folder, adapter, change):
    alter, message = CHANGES[change]
    path = adapter(alter, config=False)
    with pytest.raises(ValueError, match=message):
        add_teacher(loaded(sd35_folder, STUDENTS["lora"]), "teacher_0", Teacher(path))


def test_an_adapter_without_its_configuration_is_read_off_its_tensors(sd35_folder, adapter):
    """At a strength of alpha = rank, which is what other trainers mean by leaving it out."""
    plain = loaded(sd35_folder, LoRA(rank=3, alpha=3), 1)
    policy = loaded(sd35_folder, STUDENTS["lora"])
    add_teacher(policy, "teacher_0", Teacher(adapter(lambda s: s, config=False)))
    assert (velocity(policy, "teacher_0") - velocity(plain)).abs().max() <= 1e-6


@pytest.mark.parametrize("lora", list(STUDENTS))
@pytest.mark.parametrize("kind", ["adapter", "transformer", "adapter_run", "full_run"])
def test_a_teacher_of_another_width_is_refused(sd35_folder, tmp_path, kind, lora):
    pipeline = tiny.sd3_pipeline()
    config = dict(pipeline.transformer.config) | {"num_attention_heads": 2, "caption_projection_dim": 16}
    pipeline.transformer = diffusers.SD3Transformer2DModel(**config)
    other = tiny.save(pipeline, tmp_path / "other")
    theirs = THEIRS if "adapter" in kind else None
    if "run" in kind:
        policy = loaded(other, LoRA(**theirs) if theirs else None, 1)
        config = {"model": learner(sd35_folder, lora=theirs)}
        state = policy.trainable_state({f"policy.{k}": v for k, v in policy.state_dict().items()}, "policy.")
        torch.save({"state_dict": state, "lit_diffrl_config": yaml.safe_dump(config)}, tmp_path / "other.ckpt")
        path = tmp_path / "other.ckpt"
    else:
        path = loaded(other, LoRA(**theirs) if theirs else None, 1).export(tmp_path / "theirs")
    with pytest.raises(ValueError, match=f"the teacher {path}: "):
        add_teacher(loaded(sd35_folder, STUDENTS[lora]), "teacher_0", Teacher(str(path)))


def test_a_transformer_of_other_layers_is_refused(sd35_folder, tmp_path):
    other = tiny.save(tiny.sd3_pipeline(v35=False), tmp_path / "sd3")
    with pytest.raises(ValueError, match=f"(?s)the teacher {other}: .*Missing key"):
        add_teacher(loaded(sd35_folder, None), "teacher_0", Teacher(other))


def test_a_run_from_another_model_is_said(sd35_folder, saved, tmp_path):
    path, _, expected = saved["lora_run_live"]
    twin = shutil.copytree(sd35_folder, tmp_path / "twin")
    policy = loaded(str(twin), STUDENTS["lora"])
    with pytest.warns(UserWarning, match="they must be the same model"):
        add_teacher(policy, "teacher_0", Teacher(str(path)))
    assert (velocity(policy, "teacher_0") - expected).abs().max() <= 1e-6


def test_an_average_that_was_not_kept_is_refused(sd35_folder, saved, tmp_path):
    checkpoint = torch.load(saved["lora_run_live"][0], weights_only=True)
    torch.save({**checkpoint, "callbacks": {}}, tmp_path / "plain.ckpt")
    teacher = Teacher(str(tmp_path / "plain.ckpt"), weights="ema")
    with pytest.raises(ValueError, match=r"plain\.ckpt: .*holds no average"):
        add_teacher(loaded(sd35_folder, STUDENTS["lora"]), "teacher_0", teacher)


def test_a_checkpoint_without_a_config_is_refused(sd35_folder, saved, tmp_path):
    checkpoint = torch.load(saved["lora_run_live"][0], weights_only=True)
    torch.save({"state_dict": checkpoint["state_dict"]}, tmp_path / "bare.ckpt")
    with pytest.raises(ValueError, match=r"bare\.ckpt holds no config"):
        add_teacher(loaded(sd35_folder, STUDENTS["lora"]), "teacher_0", Teacher(str(tmp_path / "bare.ckpt")))


# -- before and after a run ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_teachers_that_are_there_pass_the_check(saved, kind):
    Teacher(str(saved[kind][0])).check()
    Teacher("owner/name").check()


@pytest.mark.parametrize("path", ["nowhere", "nowhere/last.ckpt", "/nowhere/at/all", "embedded:nothing"])
def test_teachers_that_are_not_there_are_refused_without_a_model(path):
    with pytest.raises(FileNotFoundError, match=path):
        Teacher(path).check()


def hub(folder: Path, name: str, source: str | Path) -> Path:
    """A cache of the hub that holds one repository."""
    repository, commit = folder / f"models--{name.replace('/', '--')}", "0" * 40
    shutil.copytree(source, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    return folder


def test_a_pipeline_of_the_hub_is_a_teacher(sd35_folder, saved, tmp_path, monkeypatch):
    """Also from its cache, without a connection."""
    pipeline = shutil.copytree(sd35_folder, tmp_path / "pipeline")
    shutil.copytree(saved["transformer"][0], pipeline / "transformer", dirs_exist_ok=True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub(tmp_path / "hub", "owner/name", pipeline)))
    policy = loaded(sd35_folder, STUDENTS["lora"])
    add_teacher(policy, "teacher_0", Teacher("owner/name"))
    assert (velocity(policy, "teacher_0") - saved["transformer"][2]).abs().max() <= 1e-6


def test_a_distilled_student_needs_its_teachers_no_more(sd35_folder, saved, tmp_path, capsys):
    teacher = shutil.copytree(saved["lora_run_folder"][0], tmp_path / "teacher")
    other = shutil.copytree(saved["lora_folder"][0], tmp_path / "other")
    teachers = {"": {"path": str(teacher), "guidance_scale": 2.0, "weights": "ema"}, "*": str(other)}
    cli(tmp_path, "fit", learner(sd35_folder, "DiffusionOPD", {"rank": 2, "alpha": 4}, teachers=teachers))
    (ckpt,) = tmp_path.glob("runs/**/last.ckpt")
    state = torch.load(ckpt, weights_only=True)
    assert state["state_dict"] and all(".default." in key for key in state["state_dict"])
    shutil.rmtree(teacher)
    shutil.rmtree(other)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        module, _ = load_run(ckpt)
        assert module.teachers[""] == Teacher(str(teacher), 2.0, "ema") and module.teachers["*"] == Teacher(str(other))
        assert module.policy.roles.names == ["default", "reference"]
        live = module.state_dict()
        assert all(torch.equal(live[k], v) for k, v in state["state_dict"].items())
        capsys.readouterr()
        main(["validate", "--ckpt_path", str(ckpt), "--trainer.limit_val_batches=1.0"])
        assert "val/plain" in capsys.readouterr().out
        main(["export", "--ckpt_path", str(ckpt), "--out_dir", "out"])
        patch.delenv("PL_GLOBAL_SEED", raising=False)
    assert (tmp_path / "out" / "pytorch_lora_weights.safetensors").is_file()
    with pytest.raises(SystemExit):
        cli(tmp_path, "fit", learner(sd35_folder, "DiffusionOPD", {"rank": 2, "alpha": 4}, teachers=teachers))
    assert f"'{teacher}' is neither the folder of a run" in capsys.readouterr().err


def test_an_average_is_asked_of_runs_only(saved):
    with pytest.raises(ValueError, match="only a run has an average"):
        Teacher(saved["lora_file"][0], weights="ema").check()


def test_the_embedded_model_and_a_home_folder_are_found(monkeypatch, saved):
    Teacher("embedded:shapes").check()
    lora = Path(saved["lora_file"][0])
    monkeypatch.setenv("HOME", str(lora.parent))
    assert Teacher(f"~/{lora.name}").location == str(lora)
