"""The command ``lit-diffrl``. Nothing heavy is imported before it is known what to do."""

import difflib
import os
import sys
from collections.abc import Sequence

from lit_diffrl import __version__

COMMANDS = {
    "fit": "Train: collect, score and learn, one round after the other.",
    "validate": "Score the held-out prompts of the run.",
    "test": "Score the test prompts of the run.",
    "predict": "Write the samples of the prediction prompts as files.",
    "export": "Write the policy of a checkpoint in the format of diffusers.",
}

_OVERVIEW = """\
usage: lit-diffrl COMMAND [--config FILE] [--ckpt_path FILE] [--key.of.the.config VALUE ...]

Reinforcement-learning post-training of diffusion and flow-matching models.

commands:
{commands}

examples:
  lit-diffrl fit --config configs/quickstart.yaml
  lit-diffrl fit --config configs/quickstart.yaml --model.optimizer.lr 1e-4 --rewards.match.weight 2
  lit-diffrl fit --config configs/quickstart.yaml --print_config     the whole config, defaults included
  lit-diffrl validate --ckpt_path last.ckpt                          the config is in the checkpoint
  lit-diffrl export --ckpt_path last.ckpt --out_dir my_lora
  tensorboard --logdir runs

help:
  lit-diffrl COMMAND --help          the options of a command, and the algorithms, policies and rewards there are
  lit-diffrl fit --model.help RVM    the options of a class; likewise --data.help, --rewards.help and
                                     --trainer.callbacks.help"""


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line.

    Args:
        args: what follows ``lit-diffrl``; the arguments of the process where omitted.

    Raises:
        SystemExit: with code 2 and one short message where the arguments are wrong, with 0 after help.
    """
    args = list(sys.argv[1:] if args is None else args)
    command = args[0] if args else ""
    if command in ("-h", "--help", "--version"):
        print(f"lit-diffrl {__version__}" if command == "--version" else overview())
        return
    if command not in COMMANDS:
        _refuse(command)
    if os.getcwd() not in sys.path:  # a script's path lacks it, and a user's classes are there
        sys.path.append(os.getcwd())
    from lit_diffrl.cli.app import run

    run(args)


def overview() -> str:
    """The help of the command as a whole."""
    return _OVERVIEW.format(commands="\n".join(f"  {name:10}{what}" for name, what in COMMANDS.items()))


def _refuse(command: str) -> None:
    near = difflib.get_close_matches(command, COMMANDS, 1)
    if not command:
        hint = "give a command"
    elif command.startswith("-"):
        hint = f"{command!r} stands before the command: write `lit-diffrl COMMAND {command} ...`"
    else:
        hint = f"there is no command {command!r}" + (f"; did you mean {near[0]!r}?" if near else "")
    print(f"lit-diffrl: error: {hint}\nThe commands are {', '.join(COMMANDS)}; see lit-diffrl --help", file=sys.stderr)
    raise SystemExit(2)
