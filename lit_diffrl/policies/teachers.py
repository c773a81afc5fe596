"""Teachers: trained weights of the student's architecture, from wherever they were saved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from lit_diffrl.policies.base import Policy, locate
from lit_diffrl.policies.lora import LoRA
from lit_diffrl.policies.saved import Weights, config_text, find_checkpoint, read_checkpoint, weights_of


@dataclass(frozen=True)
class Teacher:
    """Where a teacher's weights lie, and how it is asked.

    Attributes:
        path: the folder of a run of ``lit-diffrl fit``, or of its versions, or one of its checkpoints; a LoRA, as a
            folder, file or hub id; or a transformer, as the folder of it, of what holds it as ``transformer/``, or the
            hub id of a pipeline.
        guidance_scale: of the teacher; the student's where omitted.
        weights: of a run: ``live``, those in training, or ``ema``, their average.
    """

    path: str
    guidance_scale: float | None = None
    weights: Weights = "live"

    @property
    def location(self) -> str:
        """The path with ``~`` and ``embedded:`` resolved, or the hub id."""
        path = str(self.path)
        return locate(path) if path.startswith("embedded:") else str(Path(path).expanduser())

    def check(self) -> None:
        """Look whether there is anything, before a model is loaded.

        Raises:
            FileNotFoundError: if not.
            ValueError: for an average that only a run has.
        """
        try:
            location = self.location
            checkpoint = find_checkpoint(location)
            if checkpoint is None and not Path(location).exists():
                locate(location)
        except (FileNotFoundError, ValueError):
            raise FileNotFoundError(
                f"the teacher {str(self.path)!r} is neither the folder of a run, a checkpoint, a LoRA, a transformer, "
                "nor a hub id like 'owner/name'"
            ) from None
        if checkpoint is not None and not checkpoint.exists():
            raise FileNotFoundError(f"there is no checkpoint {checkpoint}")
        if checkpoint is None and self.weights != "live":
            raise ValueError(f"weights of the teacher {self.path} is {self.weights!r}, but only a run has an average")


def add_teacher(policy: Policy, role: str, teacher: Teacher) -> None:
    """Load a teacher and make it a role of a loaded policy.

    Raises:
        ValueError: if its weights do not fit the policy's transformer, or a file is damaged.
        OSError: if they cannot be read.
    """
    location = teacher.location
    checkpoint = find_checkpoint(location)
    with _named(teacher.path):
        if checkpoint is not None:
            _from_run(policy, role, checkpoint, teacher.weights)
        elif folder := _transformer_folder(location):
            _add_transformer(policy, role, _pretrained(policy, folder).state_dict())
        else:
            _from_hub(policy, role, location)


@contextmanager
def _named(path: str) -> Iterator[None]:
    """Say which teacher it was."""
    try:
        yield
    except ValueError as e:
        raise ValueError(f"the teacher {path}: {e}") from e


def _from_run(policy: Policy, role: str, path: Path, weights: Weights) -> None:
    checkpoint = read_checkpoint(path)
    options = yaml.safe_load(config_text(checkpoint, path))["model"]["init_args"]["policy"]["init_args"]
    rank_zero_info(f"{role}: {path}")
    if _located(options["pretrained"]) != policy.pretrained:
        rank_zero_warn(
            f"the teacher {path} was trained from {options['pretrained']!r}, the student starts from "
            f"{policy.pretrained!r}: they must be the same model"
        )
    prefix = "policy.transformer."
    state = {k.removeprefix(prefix): v for k, v in weights_of(checkpoint, weights).items() if k.startswith(prefix)}
    if options.get("lora") is None:
        _add_transformer(policy, role, state)
        return
    lora = options["lora"]
    config = LoRA(**lora.get("init_args", lora)).config(policy.lora_targets).to_dict()
    adapter = {f"transformer.{k.replace('.default.', '.')}": v for k, v in state.items() if ".default." in k}
    policy.roles.add_adapter(role, adapter, {f"transformer.{k}": v for k, v in config.items()}, partial(_base, policy))


def _from_hub(policy: Policy, role: str, path: str) -> None:
    """A LoRA in the format of diffusers; a hub id may be that of a pipeline as well."""
    if not Path(path).exists() and _holds_transformer(policy, path):
        _add_transformer(policy, role, _pretrained(policy, path, subfolder="transformer").state_dict())
        return
    state, metadata = policy.pipeline.lora_state_dict(path, return_lora_metadata=True)
    policy.roles.add_adapter(role, state, metadata, partial(_base, policy))


def _located(pretrained: str) -> str:
    try:
        return locate(pretrained)
    except (FileNotFoundError, ValueError):
        return pretrained  # a folder that has gone since: its name still tells


def _base(policy: Policy) -> Any:
    """The transformer before training, whatever the student has become."""
    base = _pretrained(policy, policy.pretrained, subfolder="transformer", revision=policy.revision)
    return base.to(policy.device)


def _pretrained(policy: Policy, path: str | Path, **options: Any) -> Any:
    """A transformer of the policy's class, in its precision."""
    return type(policy.transformer).from_pretrained(path, torch_dtype=policy.dtype, **options)


def _holds_transformer(policy: Policy, hub_id: str) -> bool:
    """Whether a repository is that of a pipeline."""
    # Asked first: of a repository without a LoRA, diffusers would take whichever file of weights it meets.
    try:
        type(policy.transformer).load_config(hub_id, subfolder="transformer")
    except OSError:
        return False
    return True


def _transformer_folder(path: str) -> Path | None:
    """The folder of a transformer's weights, if the path is that of one, or of what holds it."""
    folder = Path(path)
    return next((f for f in (folder / "transformer", folder) if (f / "config.json").is_file()), None)


def _add_transformer(policy: Policy, role: str, state: dict[str, Tensor]) -> None:
    bare: Any = type(policy.transformer).from_config(dict(policy.transformer.config))
    try:
        bare.load_state_dict(state)
    except RuntimeError as e:
        raise ValueError(str(e)) from e
    if policy.dtype != torch.float32:
        bare = bare.to(policy.dtype)
    policy.roles.add_copy(role, bare.to(policy.device))
