"""Help, and how fast it comes."""

import resource
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from lit_diffrl.cli import COMMANDS, main


def cpu_seconds(*command: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_the_installed_command_helps_at_once():
    assert cpu_seconds(str(Path(sys.executable).parent / "lit-diffrl"), "--help") < 4


def test_importing_the_package_does_not_import_torch():
    code = "import sys, lit_diffrl; assert lit_diffrl.__version__; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_public_names_are_there_and_others_are_told_apart():
    import lit_diffrl

    assert all(getattr(lit_diffrl, name) for name in lit_diffrl.__all__)
    with pytest.raises(AttributeError, match="it has AWM"):
        lit_diffrl.RMV  # noqa: B018


def test_the_entry_point_returns_nothing(capsys):
    (script,) = entry_points(group="console_scripts", name="lit-diffrl")
    assert script.load() is main
    assert main(["--help"]) is None  # a value would become the exit code
    assert all(command in capsys.readouterr().out for command in [*COMMANDS][:1])
    assert main(["--version"]) is None
    assert capsys.readouterr().out.startswith("lit-diffrl 0.")


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_fits_a_few_screens_and_lists_the_classes(command, capsys):
    with pytest.raises(SystemExit) as exit_:
        main([command, "--help"])
    assert exit_.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 140
    text = " ".join(lines)
    assert COMMANDS[command] in text
    assert "FlowGRPO" in text and "JPEGCompressibility" in text and "--ckpt_path" in text


def test_the_help_of_a_class_is_its_docstring(capsys):
    with pytest.raises(SystemExit):
        main(["fit", "--model.help", "FlowGRPO"])
    out = capsys.readouterr().out
    assert "--model.clip" in out and "--model.optimizer" in out


def shown(capsys, *args):
    """The help without its line breaks."""
    with pytest.raises(SystemExit) as exit_:
        main([*args])
    assert exit_.value.code == 0
    return " ".join(capsys.readouterr().out.split())


def test_help_names_the_callbacks_that_can_be_left_out(capsys):
    names = "RichRolloutProgressBar, Report, SampleLogger, ModelCheckpoint, SampleWriter"
    assert f"--omit_callbacks [NAME,...] Standard callbacks to do without, of {names} (" in shown(
        capsys, "fit", "--help"
    )


@pytest.mark.parametrize(
    "args",
    [
        ["--help"],
        *(["--model.help", name] for name in ("FlowGRPO", "RVM", "DiffusionNFT")),
        ["--data.help", "RolloutDataModule"],
        *(["--rewards.help", name] for name in ("PromptMatch", "JPEGCompressibility", "FunctionReward")),
        *(["--trainer.callbacks.help", name] for name in ("EMA", "SampleLogger")),
        ["--model.help", "FlowGRPO", "--model.policy.help", "SD3Policy"],
    ],
    ids=" ".join,
)
def test_help_is_plain_text(args, capsys):
    text = shown(capsys, "fit", *args)
    assert "`" not in text and ":class:" not in text and ":func:" not in text


@pytest.mark.parametrize(
    ("marked", "plain"),
    [
        ("see :class:`~lit_diffrl.rollouts.Rollout` and :func:`torch.no_grad`", "see Rollout and torch.no_grad"),
        (":py:meth:`the score <Reward.score>` of :attr:`.parts`", "the score of parts"),
        ("``flow`` or `dance`, ``[lo, hi)``", "flow or dance, [lo, hi)"),
        ("`its page <https://example.org>`_ says: 1 < 2", "its page says: 1 < 2"),
        ("a :b: c", "a :b: c"),
    ],
)
def test_markup_is_taken_out_of_docstrings(marked, plain):
    from lit_diffrl.cli.parser import plain_text

    assert plain_text(marked) == plain
