"""Configs: overriding, printing, and what a slip says."""

from pathlib import Path

import pytest
import yaml

from lit_diffrl.cli import main
from lit_diffrl.policies.saved import read_checkpoint

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("config", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_recipe_parses(config, printed, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert printed("-c", str(config))[0]["rewards"]


@pytest.mark.parametrize("override", [["--model", "RVM"], ["-c", "rvm.yaml"]], ids=["option", "second config"])
def test_another_algorithm_has_its_own_defaults_and_one_line_names_what_is_dropped(here, printed, override):
    (here / "rvm.yaml").write_text("model: {class_path: RVM}\n")
    config, said = printed("-c", "base.yaml", *override)
    model = config["model"]
    assert model["class_path"] == "lit_diffrl.RVM"
    assert "clip" not in model["init_args"]
    assert model["init_args"]["advantage_std"] == "global"  # RVM's default, not FlowGRPO's
    assert model["init_args"]["num_steps"] == 3
    assert model["init_args"]["policy"]["init_args"]["lora"]["init_args"]["rank"] == 4
    assert [line for line in said.splitlines() if "drops" in line] == [
        "lit-diffrl: RVM replaces FlowGRPO and drops its clip"
    ]


def test_another_algorithm_takes_its_argument(here, printed):
    model = printed("-c", "base.yaml", "--model", "RVM", "--model.beta", "0.5")[0]["model"]
    assert model["class_path"] == "lit_diffrl.RVM" and model["init_args"]["beta"] == 0.5


def test_a_reward_is_overridden_by_name(here, printed):
    before, after = (printed("-c", "base.yaml", *more)[0] for more in ([], ["--rewards.rough.weight", "0.9"]))
    assert after["rewards"]["rough"]["init_args"].pop("weight") == 0.9
    assert before["rewards"]["rough"]["init_args"].pop("weight") == 0.3
    assert before == after


def test_a_dataclass_is_overridden_by_dots(here, printed):
    config, said = printed("-c", "base.yaml", "--model.policy.lora.rank", "8")
    assert config["model"]["init_args"]["policy"]["init_args"]["lora"]["init_args"] == {
        "rank": 8,
        "alpha": 8.0,
        "dropout": 0.0,
        "init": "gaussian",
        "targets": None,
    }
    assert not said


def test_the_printed_config_gives_itself_again(here, printed):
    first, _ = printed("-c", "base.yaml")
    (here / "resolved.yaml").write_text(yaml.safe_dump(first))
    assert printed("-c", "resolved.yaml") == (first, "")


@pytest.mark.parametrize(
    ("options", "wrong", "right"),
    [
        (["--model.clp", "1"], "clp", "clip"),
        (["--model.optimizer.lrr", "1"], "lrr", "lr"),
        (["--model.policy.pretraind", "x"], "pretraind", "pretrained"),
        (["--model.policy.lora.rnak", "1"], "rnak", "rank"),
        (["--modle.clip", "1"], "modle", "model"),
        (["--model", "FlowGRP"], "FlowGRP", "FlowGRPO"),
        (["--model", "flowgrpo"], "flowgrpo", "FlowGRPO"),
        (["--data.group_siz", "1"], "group_siz", "group_size"),
        (["--trainer.max_epoch", "1"], "trainer.max_epoch", "trainer.max_epochs"),  # not an abbreviation
        (["--max_epochs", "1"], "max_epochs", "trainer.max_epochs"),
        (["--rewards.rough.wieght", "1"], "wieght", "weight"),
        (["--reward.rough.weight", "1"], "reward", "rewards"),
        (["--trainer.callbacks+=EMAA"], "EMAA", "EMA"),
        (["--trainer.callbacks+=EMA", "--trainer.callbacks.dcay=0.5"], "dcay", "decay"),
        (["--model.optimizer", "AdmW"], "AdmW", "AdamW"),
    ],
)
def test_a_slip_on_the_command_line_is_named_with_what_is_right(here, refused, options, wrong, right):
    _check_slip(refused("fit", "-c", "base.yaml", *options), wrong, right)


@pytest.mark.parametrize(
    ("wrong", "right", "shown"),
    [
        ("clp", "clip", "clip"),
        ("num_step", "num_steps", "num_steps"),
        ("max_epoch", "max_epochs", "trainer.max_epochs"),
        ("group_siz", "group_size", "group_size"),
        ("rnak", "rank", "rank"),
        ("reward", "rewards", "rewards"),
        ("qualty", "quality", "quality"),
        ("JPEGCompressiblity", "JPEGCompressibility", "JPEGCompressibility"),
        ("SD3Polcy", "SD3Policy", "SD3Policy"),
    ],
)
def test_a_slip_in_a_file_is_named_with_what_is_right(here, refused, wrong, right, shown):
    text = (here / "base.yaml").read_text()
    assert right in text
    (here / "base.yaml").write_text(text.replace(right, wrong, 1))
    _check_slip(refused("fit", "-c", "base.yaml"), wrong, shown)


def _check_slip(message: str, wrong: str, right: str) -> None:
    assert f"{wrong}'" in message and f"'{right}'" in message
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([], "give a command"),
        (["fti"], "did you mean 'fit'?"),
        (["-c", "base.yaml", "fit"], "lit-diffrl COMMAND -c"),
        (["fit"], "give --config FILE, or --ckpt_path FILE"),
        (["fit", "-c", "nothere.yaml"], "nothere.yaml"),
        (["fit", "-c", "base.yaml", "--model.clip", "abc"], "model.clip: Expected float. Got value: abc"),
        (["fit", "-c", "base.yaml", "--trainer.max_epochs", "two"], "trainer.max_epochs: Expected int. Got value: two"),
        (["fit", "-c", "base.yaml", "--model", "mine.Algo"], "mine.Algo cannot be imported: No module named 'mine'"),
        (["fit", "-c", "base.yaml", "--rewards.x", "mine.f"], "mine.f cannot be imported: No module named 'mine'"),
        (["fit", "-c", "base.yaml", "--model", "Abrakadabra"], "there is no class 'Abrakadabra'; valid are AWM, "),
        (["fit", "-c", "base.yaml", "--data.batch_size", "0"], "data.batch_size is 0"),
        (["fit", "-c", "base.yaml", "--data.prompts", "no.txt"], "prompt file no.txt does not exist"),
        (["fit", "-c", "base.yaml", "--model.policy.pretrained", "embedded:x"], "the embedded models are ['shapes']"),
        (["fit", "-c", "base.yaml", "--trainer.strategy", "dpp"], "invalid strategy name"),
        (["fit", "-c", "base.yaml", "--rewards", "{}"], "no reward: add one under `rewards:`"),
        (["validate", "--ckpt_path", "no.ckpt"], "there is no checkpoint no.ckpt"),
        (["export", "--ckpt_path", "no.ckpt", "--trainer.devices", "2"], "`export` does not use --trainer.devices"),
    ],
)
def test_a_mistake_ends_with_code_2_and_a_short_message(here, refused, args, says):
    message = refused(*args)
    assert says in message
    assert "Traceback" not in message and "usage:" not in message


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--rewards.rogh.weight", "4"], "rewards.rogh has no class_path; did you mean 'rough'?"),
        (["--ckpt_path", "nowhere.ckpt"], "there is no checkpoint nowhere.ckpt"),
        (["--model.optimizer.init_args.lr", "abc"], "model.optimizer.lr: 'abc' is not a valid value"),
    ],
)
def test_a_slip_ends_before_a_model_loads(here, refused, options, says):
    assert says in refused("fit", "-c", "base.yaml", *options)


def test_a_file_that_is_no_checkpoint_is_named(here):
    with pytest.raises(ValueError, match=r"prompts\.txt is not a checkpoint"):
        read_checkpoint("prompts.txt")


def test_an_unreadable_file_is_named(here, refused):
    (here / "broken.yaml").write_text("model:\n  - a: b: c\n")
    assert "broken.yaml" in refused("fit", "-c", "broken.yaml")


def test_an_error_inside_of_a_users_class_keeps_its_traceback(here):
    (here / "faulty.py").write_text(
        "from lit_diffrl import RVM\n\n\nclass Faulty(RVM):\n    def __init__(self, **kwargs) -> None:\n"
        "        super().__init__(**kwargs)\n        raise ValueError('mine')\n"
    )
    with pytest.raises(ValueError, match=r"^mine$"):
        main(["fit", "-c", "base.yaml", "--model", "faulty.Faulty"])
