"""The parser: short errors, readable help, and a word on what an override drops."""

import logging
import re
import sys
from argparse import SUPPRESS, Action
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, NoReturn

from jsonargparse import DefaultHelpFormatter
from lightning.pytorch.cli import LightningArgumentParser

from lit_diffrl.cli.console import say
from lit_diffrl.cli.slips import explain

_VALUES = {
    "help": "CLASS",
    "model": "CLASS",
    "data": "CLASS",
    "config": "FILE",
    "trainer": "FILE",
    "omit_callbacks": "[NAME,...]",
}
_SHOWN_HELP = ("model.help", "data.help", "rewards.help", "trainer.callbacks.help")


class Parser(LightningArgumentParser):
    """Lightning's parser, which takes whole names only and explains a slip in a sentence."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # The parser of the help of a class is made without arguments.
        super().__init__(*args, **{"allow_abbrev": False, "formatter_class": PlainHelp, **kwargs})

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Exit with code 2 and one sentence."""
        if not self.exit_on_error:  # of a class inside of the config: the parser of the command will report it
            super().error(message, ex)
        parser = getattr(ex, "subcommand_parser", None) or self
        command = getattr(parser, "subcommand", None)
        where = f"lit-diffrl {command}" if command else "lit-diffrl"
        message = message.replace('"<unicode string>"', _config_files(getattr(self, "args", [])))
        print(f"{where}: error: {explain(message, parser)}", file=sys.stderr)
        raise SystemExit(2)


def _config_files(args: list[str]) -> str:
    return " or ".join(after for flag, after in pairwise(args) if flag in ("-c", "--config")) or "the config"


class PlainHelp(DefaultHelpFormatter):
    """Docstrings without their markup."""

    def start_section(self, heading: str | None) -> None:
        """Begin a group of options, whose heading is the first sentence of a class."""
        super().start_section(heading and plain_text(heading))

    def _format_text(self, text: str) -> str:
        return super()._format_text(plain_text(text))

    def _expand_help(self, action: Action) -> str:
        return plain_text(super()._expand_help(action))


def plain_text(text: str) -> str:
    """Text without the roles and quotes of reStructuredText.

    Of a ``~path`` its last name is left, and of ``words <path>`` the words.
    """
    text = re.sub(r":(?:\w+:)+`~[^`]*?([^`.]+)`", r"\1", text)
    text = re.sub(r"(?::(?:\w+:)+)?`([^`<>]+?)\s*<[^`<>]+>`_{0,2}", r"\1", text)
    text = re.sub(r":(?:\w+:)+`[!.]?([^`]*)`", r"\1", text)
    return re.sub(r"(`{1,2})([^`]+)\1", r"\2", text)


class ShortHelp(PlainHelp):
    """A line or two an option: the first sentence of its documentation, its default, and the names it may have."""

    def __init__(self, prog: str, **kwargs: Any) -> None:
        super().__init__(prog, **{**kwargs, "width": 110, "max_help_position": 34})

    def add_argument(self, action: Action) -> None:
        """Leave out the many options that only show the help of a class of Lightning."""
        option = action.option_strings[-1].lstrip("-") if action.option_strings else ""
        if not option.endswith(".help") or option in _SHOWN_HELP:
            super().add_argument(action)

    def _format_action_invocation(self, action: Action) -> str:
        flags = [flag for flag in action.option_strings if not flag.endswith("+")]
        name = flags[-1].rpartition(".")[2].lstrip("-")
        value = _VALUES.get(name, name.upper())
        return ", ".join(flags) + (f" {value}" if action.nargs != 0 and name != "print_config" else "")

    def _get_help_string(self, action: Action) -> str:
        documented = re.sub(r"^Defaults to ``None``\. ", "", " ".join((action.help or "").split()))
        text = re.split(r"(?<=[a-z)`'\"])\.(?:\s|$)| Default: ", documented)[0].rstrip(".")
        notes = []
        if action.default not in (SUPPRESS, None) and action.option_strings:
            notes.append("default: %(default)s")
        if action.dest in ("model", "data", "rewards"):
            text = "Its class, or the file of its own config" if action.dest != "rewards" else text
            notes = [f"classes: {', '.join(_classes(action))}"]
        return text + (f" ({'; '.join(notes)})" if notes else "")


def _classes(action: Any) -> Iterable[str]:
    """Bare names of the classes that an option takes, without the base itself."""
    paths = action.extra_help().rpartition("known subclasses: ")[2].split(", ")
    return [path.rpartition(".")[2] for path in paths if path and not path.endswith((".DiffusionRL", ".Reward"))]


class _Dropped(logging.Handler):
    """Says which arguments a change of class drops, once: the parser finds them anew in each of its passes."""

    pattern = re.compile(r"class_path change from '(\S+)' to '(\S+)', discarding init_args: \{(.*)\}\.$", re.DOTALL)

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.seen: set[tuple[str, ...]] = set()

    def emit(self, record: logging.LogRecord) -> None:
        if (m := self.pattern.search(record.getMessage())) is None:
            return
        change = before, after = tuple(path.rpartition(".")[2] for path in m.groups()[:2])
        if change in self.seen or before == "DiffusionRL":  # the base is nobody's choice
            return
        self.seen.add(change)
        text, shorter = "", m[3]
        while text != shorter:  # values may be dicts themselves
            text, shorter = shorter, re.sub(r"[(\[{][^()\[\]{}]*[)\]}]", "", shorter)
        names = ", ".join(re.findall(r"'(\w+)': ", text))
        say(f"{after} replaces {before} and drops its {names}")


def dropped_arguments() -> logging.Logger:
    """The logger of the parsers, which tells of nothing but dropped arguments, each time anew.

    It is one for the process, as parsers of classes are.
    """
    logger = logging.getLogger(__name__)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    logger.handlers = [_Dropped()]
    return logger
