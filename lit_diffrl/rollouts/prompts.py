"""Prompt files: ``.txt`` with a prompt a line, ``.jsonl`` with metadata beside each."""

import json
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

EMBEDDED = "embedded:"
_EMBEDDED_FOLDER = Path(__file__).parents[1] / "policies" / "embedded"


@dataclass(frozen=True)
class Prompt:
    """One line of a prompt file.

    Attributes:
        text: what the model is asked for.
        source: the task it belongs to, by which rewards and teachers are chosen and metrics are split.
        metadata: everything else that the line says.
    """

    text: str
    source: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)


def load_prompts(path: str | Path, sources: list[str] | None = None) -> list[Prompt]:
    """Read a prompt file.

    Args:
        path: ``.txt``, one prompt a line, or ``.jsonl``, one object a line with ``prompt`` and optionally ``source``
            and any further keys. ``embedded:shapes/train.jsonl`` names a file that ships with the
            embedded model ``shapes``.
        sources: those that are wanted; all where omitted.

    Returns:
        The prompts in the order of the file. Duplicates stay, since repeating a prompt weights it, with one warning.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: for another suffix, an empty file or prompt, or a line that cannot be read; the line is named.
    """
    path = resolve(path)
    if path.suffix not in (".txt", ".jsonl"):
        raise ValueError(f"prompt file {path} has the suffix {path.suffix!r}; it must be .txt or .jsonl")
    if not path.is_file():
        raise FileNotFoundError(f"prompt file {path} does not exist")
    read = _text if path.suffix == ".txt" else _json
    with path.open(encoding="utf-8") as file:  # not splitlines(), which cuts at separators within a JSON string too
        prompts = [read(line, f"{path}, line {i}") for i, line in enumerate(file, 1)]
    if not prompts:
        raise ValueError(f"prompt file {path} is empty")
    if sources is not None:
        if not sources:
            raise ValueError("data.prompt_sources is empty; leave it out for all sources")
        known = sorted({p.source for p in prompts})
        if unknown := set(sources) - set(known):
            raise ValueError(f"data.prompt_sources names {sorted(unknown)}, but prompt file {path} has {known}")
        prompts = [p for p in prompts if p.source in sources]
    repeated = [text for text, n in Counter(p.text for p in prompts).items() if n > 1]
    if repeated:
        warnings.warn(
            f"prompt file {path}: {len(repeated)} prompts stand more than once, the first being {repeated[0]!r}; "
            "each of their lines counts",
            stacklevel=2,
        )
    return prompts


def resolve(path: str | Path) -> Path:
    """The file behind ``embedded:<model>/<file>``, or the path itself."""
    if not str(path).startswith(EMBEDDED):
        return Path(path)
    model, _, name = str(path).removeprefix(EMBEDDED).partition("/")
    return _EMBEDDED_FOLDER / model / "prompts" / name


def _text(line: str, where: str) -> Prompt:
    if not line.strip():
        raise ValueError(f"{where}: empty prompt")
    return Prompt(line.strip())


def _json(line: str, where: str) -> Prompt:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as e:
        raise ValueError(f"{where}: not a JSON object: {e}") from None
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
        raise ValueError(f'{where}: needs an object with a string under "prompt", as in {{"prompt": "a red fox"}}')
    if not row["prompt"].strip():
        raise ValueError(f"{where}: empty prompt")
    if not isinstance(row.get("source", ""), str):
        raise ValueError(f'{where}: "source" must be a string, got {row["source"]!r}')
    rest = {k: v for k, v in row.items() if k not in ("prompt", "source")}
    return Prompt(row["prompt"].strip(), row.get("source", ""), rest)
