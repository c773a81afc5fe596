"""LightningCLI for lit_diffrl: which classes there are, what a run has unasked, and where its config comes from."""

import difflib
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, get_args

import lightning as L
import yaml
from jsonargparse import set_parsing_settings
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger

# Their classes are known by bare name once they are imported.
import lit_diffrl.algorithms
import lit_diffrl.callbacks
import lit_diffrl.policies  # noqa: F401
from lit_diffrl.algorithms import DiffusionRL
from lit_diffrl.callbacks.rewards import Reward, as_reward
from lit_diffrl.checkpoints import build
from lit_diffrl.cli import COMMANDS
from lit_diffrl.cli.console import quiet, say
from lit_diffrl.cli.parser import Parser, ShortHelp, dropped_arguments
from lit_diffrl.cli.record import RunRecord, run_config
from lit_diffrl.cli.refusal import is_refusal, unwrap
from lit_diffrl.cli.resume import Changes, ConfiguredOptimizer, describe, differences
from lit_diffrl.cli.standard import Name, complete
from lit_diffrl.cli.trainer import Trainer
from lit_diffrl.policies.saved import read_config
from lit_diffrl.rollouts import RolloutDataModule

_TRAINER_DEFAULTS = {
    "default_root_dir": "runs",
    "log_every_n_steps": 1,
    "enable_model_summary": False,  # it counts roles as parameters, and nothing as FLOPs
    # The check before training scores all held-out prompts: it is the baseline that the curves start from.
    "num_sanity_val_steps": -1,
}
_EXPORT_OPTIONS = ("--ckpt_path", "--out_dir", "--weights", "--model", "--config", "--print_config", "--help")


def run(args: list[str]) -> None:
    """Run a command.

    Args:
        args: the command and its options.
    """
    quiet()
    _open_dataclasses()
    try:
        _cli(args)
    except Exception as e:
        error = unwrap(e)
        if not is_refusal(error):
            raise error from error.__cause__
        print(f"lit-diffrl {args[0]}: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _cli(args: list[str]) -> None:
    usage = "lit-diffrl {} [--config FILE] [--ckpt_path FILE] [--key.of.the.config VALUE ...]"
    DiffRLCLI(
        DiffusionRL,
        RolloutDataModule,
        save_config_callback=RunRecord,
        save_config_kwargs={"overwrite": True},
        trainer_class=Trainer,
        trainer_defaults=_TRAINER_DEFAULTS,
        seed_everything_default=0,
        parser_class=Parser,
        parser_kwargs={
            "logger": dropped_arguments(),
            "formatter_class": ShortHelp,
            **{name: {"description": what, "usage": usage.format(name)} for name, what in COMMANDS.items()},
        },
        subclass_mode_model=True,
        subclass_mode_data=True,
        auto_configure_optimizers=False,
        args=args,
    )


@cache
def _open_dataclasses() -> None:
    """Treat dataclasses as any class: jsonargparse loses one inside of a class whose owner is overridden."""
    set_parsing_settings(subclasses_enabled=["is_pure_dataclass"])


class DiffRLCLI(LightningCLI):
    """Chooses algorithm, policy, data and rewards from YAML and the command line."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Lightning's, and ``export``."""
        return {**LightningCLI.subcommands(), "export": {"model", "datamodule"}}

    # -- parsing -----------------------------------------------------------------------------------------------------

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Rewards by name, and the standard callbacks."""
        parser.add_argument(
            "--rewards",
            type=dict[str, Reward | Callable],
            default={},
            help="A mapping from names to rewards: a class, or the import path of a function of a rollout.",
        )
        parser.add_argument(
            "--omit_callbacks",
            type=list[Name],
            default=[],
            help=f"Standard callbacks to do without, of {', '.join(get_args(Name))}. "
            "One in `trainer.callbacks` takes the place of its kind anyway.",
        )

    def setup_parser(self, *args: Any, **kwargs: Any) -> None:
        """Predictions go to files, not into memory."""
        super().setup_parser(*args, **kwargs)
        self._subcommand_parsers["predict"].set_defaults(return_predictions=False)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse, with the config of the checkpoint under the options where no config is given."""
        command, options = args[0], args[1:]
        names = [o.split("=")[0] for o in options]
        ckpt_path = _value(options, "--ckpt_path")
        asks_help = any(name in ("-h", "--help") or name.endswith(".help") for name in names)
        error = self._subcommand_parsers[command].error
        needless = [n for n in names if n.startswith("--") and n.split(".")[0] not in _EXPORT_OPTIONS]
        if command == "export" and needless:
            error(f"`export` does not use {needless[0]}; it takes {', '.join(_EXPORT_OPTIONS)}")
        # Anything but Lightning's keywords and addresses is a file.
        is_file = bool(ckpt_path) and ckpt_path not in ("best", "last", "hpc") and not re.match(r"\w+:", str(ckpt_path))
        if is_file and not asks_help and not Path(str(ckpt_path)).exists():
            error(f"there is no checkpoint {ckpt_path}")
        if ckpt_path and not asks_help and not {"-c", "--config"} & set(names):
            try:
                options = ["--config", read_config(ckpt_path), *options]
            except (FileNotFoundError, ValueError) as e:
                error(str(e))
        self.config = parser.parse_args([command, *options])

    def _parse_ckpt_path(self) -> None:
        """Leave the config as it is: Lightning would let a checkpoint's hyperparameters override the command line."""

    # -- building ----------------------------------------------------------------------------------------------------

    def before_instantiate_classes(self) -> None:
        """Say what a resumed run changes."""
        config = self.config[self.subcommand]
        self.changes: Changes = {}
        if self.subcommand == "fit" and config.ckpt_path and Path(config.ckpt_path).exists():
            after = run_config(self._parser("fit").dump(config, skip_none=False))
            try:
                self.changes = differences(yaml.safe_load(read_config(config.ckpt_path)), after)
            except ValueError as e:
                say(f"resuming, without knowing what has changed: {e}")
                return
            changed = f"with other settings, which count from here on: {describe(self.changes)}"
            say(f"resuming {config.ckpt_path} {changed if self.changes else 'unchanged'}")

    def instantiate_classes(self) -> None:
        """Build what the command needs."""
        if self.subcommand == "export":
            self._instantiate_model()
        else:
            super().instantiate_classes()

    def _instantiate_model(self) -> None:
        """All that an export needs: not the prompts, nor the rewards, nor the devices of the run."""
        self.config_init = self.config
        config = run_config(self._parser("export").dump(self.config["export"], skip_none=False))
        self.model, self.datamodule = build(config, model=DiffusionRL)["model"], None
        self.trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """The trainer, with the rewards first among its callbacks, the standard ones, and a logger in ``runs/``."""
        config = self._get(self.config_init, "trainer")
        rewards = self._rewards(self._get(self.config_init, "rewards"))
        own = config.callbacks or []
        config.callbacks = [*rewards, *(own if isinstance(own, list) else [own])]
        if self.changes:
            config.callbacks.append(ConfiguredOptimizer(self.changes))
        complete(config, str(self.subcommand), self._get(self.config_init, "omit_callbacks"))
        if config.logger in (None, True):
            name = type(self.model).__name__
            config.logger = TensorBoardLogger(config.default_root_dir, name, default_hp_metric=False)
        return super().instantiate_trainer(**kwargs)

    def _rewards(self, named: dict[str, Any]) -> list[Reward]:
        """The rewards of the config. A slip in a name makes a new one, of which nothing but the slip is known."""
        for name, obj in named.items():
            if type(obj) is Reward:
                known = [other for other, reward in named.items() if type(reward) is not Reward]
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f" (the others are {', '.join(known) or 'none'})"
                raise ValueError(f"rewards.{name} has no class_path{hint}")
        return [as_reward(name, obj) for name, obj in named.items()]


def _value(options: list[str], flag: str) -> str | None:
    """What a flag is given as, in either of its forms."""
    for option, following in zip(options, [*options[1:], ""]):
        if option == flag:
            return following
        if option.startswith(f"{flag}="):
            return option.partition("=")[2]
    return None
