"""Checks of settings that a config parser makes too, for those who build an algorithm in Python."""

from typing import Any, get_args


def one_of(name: str, value: Any, choices: Any) -> None:
    """Refuse what is none of a ``Literal``.

    Raises:
        ValueError: with the setting, its value and the choices.
    """
    if value not in get_args(choices):
        raise ValueError(f"model.{name} is {value!r}; it must be one of {', '.join(map(repr, get_args(choices)))}")
