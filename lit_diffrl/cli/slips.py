"""What a rejected option should have been: one sentence in place of the parser's nested reasons."""

import difflib
import inspect
import re
from collections.abc import Iterator
from typing import Any, get_args

from jsonargparse import ArgumentParser
from lightning.pytorch.cli import LightningArgumentParser

_OUTER = re.compile(r"Subcommand '\w+' does not accept option '(\S+)'|unrecognized arguments: --([^\s=]+)")
_STEP = re.compile(
    r'Parser key "(?P<key>[^"]+)"'
    r"|Problem with given class_path '(?P<cls>[^']+)'"
    r"|Group '(?P<group>[^']+)' does not accept option '(?P<member>[^']+)'"
    r"|Option '(?P<option>[^']+)' is not accepted(?:.*class_path='(?P<of>[^']+)')?"
    r"|Expected a dot import path string: (?P<name>\S+)"
)
_NOISE = re.compile(
    r"^\s*(- )?(Does not validate against any of the Union subtypes|Subtypes: .*|Errors:|Given value.*"
    r"|Expected a <class 'NoneType'>|Expected a path but .* either not accessible or invalid|)\s*$"
)
_NO_IMPORT = re.compile(
    r"class_path '(?P<path>\S+)':\s+(?P<why>No module named .*|.*has no attribute.*|cannot import .*)"
)


def explain(message: str, parser: ArgumentParser) -> str:
    """Say what is wrong with an option, and what would be right.

    Args:
        message: of the parser.
        parser: of the command, whose options are known.
    """
    if m := _OUTER.search(message):
        return _unknown_key(m[1] or m[2], _keys(parser))
    if "arguments are required" in message:
        return f"{message}; give --config FILE, or --ckpt_path FILE to take the config of a run"
    return _nested(message, parser) or _plain(message)


def _nested(message: str, parser: ArgumentParser) -> str | None:
    """For a slip inside of a class: follow the message to it."""
    keys: list[str] = []
    here: ArgumentParser | None = parser
    action: Any = None
    owner = ""
    for m in _STEP.finditer(message):
        if key := m["key"]:
            keys.append(key)
            action = _action(here, key)
        elif m["cls"]:
            owner, here = m["cls"], _class_parser(m["cls"])
        elif m["option"] or m["member"]:
            owner = m["of"] or owner
            inside = _keys(_class_parser(owner)) if owner else _keys(here)
            wrong = f"{m['group']}.{m['member']}" if m["member"] else m["option"]
            return f"{'.'.join(keys)}: {_unknown_key(wrong, inside, owner.rpartition('.')[2])}"
        elif m["name"]:
            known = sorted(_names(getattr(action, "_typehint", None)))
            if not known:  # a value was tried as a class after everything else
                return f"{'.'.join(keys)}: {m['name']!r} is not a valid value"
            return f"{'.'.join(keys)}: there is no class {m['name']!r}{_hint(m['name'], known)}"
    return None


def _unknown_key(key: str, known: set[str], owner: str = "") -> str:
    """Blame the first part of a dotted key that does not exist."""
    parts = key.removesuffix("+").split(".")
    depth = next((i for i in range(len(parts)) if ".".join(parts[: i + 1]) not in known), len(parts) - 1)
    parent, wrong = ".".join(parts[:depth]), ".".join(parts[: depth + 1])
    siblings = {k for k in known if k.rpartition(".")[0] == parent}
    leaf = parts[depth]
    elsewhere = [k for k in known if k.rpartition(".")[2] == leaf]
    hint = f"; did you mean {elsewhere[0]!r}?" if elsewhere else _hint(wrong, sorted(siblings))
    return f"{owner or 'there'} {'has' if owner else 'is'} no option {wrong!r}{hint}"


def _hint(wrong: str, known: list[str]) -> str:
    by_fold = {k.lower(): k for k in known}
    near = [by_fold[k] for k in difflib.get_close_matches(wrong.lower(), by_fold, n=2)]
    if near:
        return f"; did you mean {' or '.join(map(repr, near))}?"
    return f"; valid are {', '.join(known)}" if known else ""


def _plain(message: str) -> str:
    """Any other message without the alternatives that say nothing."""
    if m := _NO_IMPORT.search(message):
        keys = re.findall(r'Parser key "([^"]+)"', message[: m.start()])
        where = "what is installed and the present directory were searched"
        return f"{'.'.join(keys)}: {m['path']} cannot be imported: {m['why']} ({where})"
    lines = [re.sub(r"^\s*(- )?", "", line).strip() for line in message.splitlines() if not _NOISE.match(line)]
    text = re.sub(r"Problem with given class_path '[^']+': ?", "", " ".join(dict.fromkeys(lines)))
    text = re.sub(r'Parser key "([^"]+)":', r"\1:", text)
    while text != (text := re.sub(r"^([\w.]+): ([\w.]+): ", r"\1.\2: ", text)):
        pass
    text = re.sub(r"\ba <class '(\w+)'>|\ba typing\.(?=\w)", r"\1", text)
    value = re.search(r"^\s*Given value: (.{1,60})$", message, re.MULTILINE)
    return text if "Got value" in text or value is None else f"{text}. Got value: {value[1]}"


def _keys(parser: ArgumentParser | None) -> set[str]:
    """All options of a parser, and the groups that they are in."""
    actions = parser._actions if parser is not None else []
    names = {a.dest for a in actions if a.option_strings and not a.dest.endswith(".help")} - {"help", "print_config"}
    return {".".join(name.split(".")[: i + 1]) for name in names for i in range(name.count(".") + 1)}


def _action(parser: ArgumentParser | None, key: str) -> Any:
    actions = parser._actions if parser is not None else []
    return next((a for a in actions if a.dest == key and hasattr(a, "_typehint")), None)


def _class_parser(path: str) -> ArgumentParser | None:
    """A parser of the options of a class."""
    module, _, name = path.rpartition(".")
    try:
        cls = getattr(__import__(module, fromlist=[name]), name)
        parser = LightningArgumentParser(exit_on_error=False)
        parser.add_class_arguments(cls, fail_untyped=False)
    except Exception:  # the message is made without a suggestion then
        return None
    return parser


def _names(hint: Any) -> Iterator[str]:
    """Names of the classes that may stand where a type is asked for."""
    if isinstance(hint, type) and hint.__module__ not in ("builtins", "collections.abc"):
        if not (inspect.isabstract(hint) or hint.__name__.startswith("_")):
            yield hint.__name__
        subclasses: list[type] = type.__subclasses__(hint)
        for cls in subclasses:
            yield from _names(cls)
        return
    for part in hint if isinstance(hint, list) else get_args(hint):
        yield from _names(part)
