"""Resuming with another config than the checkpoint's: what differs is said, and the config given now is what counts."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import lightning as L
from lightning.pytorch import Callback

Changes = dict[str, tuple[Any, Any]]


def differences(before: Any, after: Any) -> Changes:
    """The settings that differ between two configs: their name as on the command line -> (before, after)."""
    return dict(_walk(before, after, ""))


def _walk(before: Any, after: Any, key: str) -> Iterator[tuple[str, tuple[Any, Any]]]:
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for name in [*before, *(k for k in after if k not in before)]:
            # What is not written in one of them is not set there.
            pair = before.get(name), after.get(name)
            yield from _walk(*pair, key if name in ("init_args", "class_path") else f"{key}.{name}".lstrip("."))
    elif before != after:
        yield key, (before, after)


def describe(changes: Changes) -> str:
    """The changes in one line."""
    return ", ".join(f"{key} {_short(before)} -> {_short(after)}" for key, (before, after) in changes.items())


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


class ConfiguredOptimizer(Callback):
    """Puts changed settings of the optimiser and its schedule back after a checkpoint has restored the old ones.

    Args:
        changes: what differs between the config of the checkpoint and the present one.

    Raises:
        ValueError: if the optimiser or the schedule is of another class now, whose state the checkpoint does not hold.
    """

    def __init__(self, changes: Changes) -> None:
        for part in ("model.optimizer", "model.lr_scheduler"):
            before, after = changes.get(part, (None, None))
            if isinstance(before, str) and isinstance(after, str):
                raise ValueError(
                    f"{part} is {after} now and was {before} in the checkpoint, whose state it cannot take up: "
                    f"keep {before}, or start a new run"
                )
        self.settings = {k.removeprefix("model.optimizer.") for k in changes if k.startswith("model.optimizer.")}
        self.schedule = {k.removeprefix("model.lr_scheduler.") for k in changes if k.startswith("model.lr_scheduler.")}
        if "model.lr_scheduler" in changes:  # there is one now, or there is none any more
            self.settings.add("lr")
        self._groups: list[list[dict[str, Any]]] = []
        self._schedulers: list[Any] = []

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note what the config says, before the checkpoint is restored."""
        self._groups = [[_settings(group) for group in o.param_groups] for o in trainer.optimizers]
        self._schedulers = [copy.copy(vars(config.scheduler)) for config in trainer.lr_scheduler_configs]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Set it again, and leave the place in the schedule as it was restored."""
        for optimizer, groups in zip(trainer.optimizers, self._groups):
            for group, configured in zip(optimizer.param_groups, groups):
                for name in self.settings & set(configured) - {"lr"}:
                    group[name] = configured[name]
                if "lr" in self.settings:
                    _set_lr(group, configured)
        for config, configured in zip(trainer.lr_scheduler_configs, self._schedulers):
            scheduler: Any = config.scheduler
            for name in self.schedule & set(configured):
                setattr(scheduler, name, configured[name])
            if "lr" in self.settings:
                for part in [scheduler, *getattr(scheduler, "_schedulers", [])]:  # as in SequentialLR
                    if hasattr(part, "base_lrs"):
                        part.base_lrs = [group["initial_lr"] for group in scheduler.optimizer.param_groups]


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in group.items() if k != "params"}


def _set_lr(group: dict[str, Any], configured: dict[str, Any]) -> None:
    """The configured rate, times what a schedule that goes on had made of the old one."""
    base, new_base = group.get("initial_lr"), configured.get("initial_lr")
    scheduled = bool(base) and new_base is not None
    group["lr"] = new_base * group["lr"] / base if scheduled else configured["lr"]
    if new_base is not None:
        group["initial_lr"] = new_base
