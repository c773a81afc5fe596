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
    with pytest.raises(AttributeError, match="it has RVM"):
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
