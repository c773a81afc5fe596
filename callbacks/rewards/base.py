"""The base of the rewards: callbacks that score every batch of samples."""

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lit_diffrl.callbacks.checks import MediaKind, check_media, flaws
from lit_diffrl.rollouts import RewardSpec, Rollout, RolloutCallback, RolloutDataModule

# The log has them beside the rewards, as `reward/<name>` and `val/<name>`, and `std` of each as `reward/<name>/std`.
_TAKEN_NAMES = ("reward", "mean", "std", "failed", "flat_groups")
_TAKEN_PARTS = ("std",)


class Reward(RolloutCallback):
    """Scores samples; a subclass says how in :meth:`score`, and loads what it needs in :meth:`load`.

    A sample that cannot be scored (its media are not finite or not in [0, 1], :meth:`score` raises for it or returns a
    value that is not finite) gets NaN, is counted in ``reward/failed``, and does not touch its siblings. If every
    sample of the very first batch fails, the mistake is taken to be in the program and raised.

    Class attributes:
        requires: the media that it reads, ``image``, ``video`` or ``any``.
        parts: names of finer figures that :meth:`score` notes; see there.

    Attributes:
        name: under which it is logged; the key in the config, and otherwise the class's name in snake case.

    Args:
        weight: factor of the reward in the sum; may be negative, and 0 only watches.
        applies_to: the prompt sources that it scores; all where omitted.
        gate: the least score that passes, where the algorithm combines rewards by ``gated``.
        batch_size: samples scored at once; all that were drawn at once where omitted.
        scale: factor on the raw score.
        shift: added to the scaled score.
        device: where its model lives: ``auto`` (with the policy), ``cpu``, ``cuda:1``, ...
    """

    is_reward: ClassVar[bool] = True
    requires: ClassVar[MediaKind] = "any"
    parts: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        weight: float = 1.0,
        applies_to: list[str] | None = None,
        gate: float | None = None,
        batch_size: int | None = None,
        scale: float = 1.0,
        shift: float = 0.0,
        device: str = "auto",
    ) -> None:
        self.name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", type(self).__name__).lower()
        for setting, value in {"weight": weight, "gate": gate, "scale": scale, "shift": shift}.items():
            if value is not None and not math.isfinite(value):
                raise ValueError(f"{setting} of the reward {self.name} is {value}; it must be a finite number")
        if isinstance(applies_to, str) or (applies_to is not None and not applies_to):
            raise ValueError(
                f"applies_to of the reward {self.name} is {applies_to!r}; it must be a list of prompt sources"
            )
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size of the reward {self.name} is {batch_size}; it must be at least 1")
        if device != "auto":
            torch.device(device)  # names what is valid
        self.weight = weight
        self.applies_to = applies_to
        self.gate = gate
        self.batch_size = batch_size
        self.scale = scale
        self.shift = shift
        self.device = device
        self._loaded_on: torch.device | None = None
        self._proven = False
        self._warned: set[str] = set()

    @property
    def state_key(self) -> str:
        """Tells two rewards of one class apart."""
        return f"{type(self).__qualname__}[{self.name}]"

    @property
    def spec(self) -> RewardSpec:
        """How the reward enters the sum."""
        return RewardSpec(self.weight, self.gate, self.applies_to)

    # -- for subclasses -----------------------------------------------------------------------------------------------

    def load(self, device: torch.device) -> None:
        """Load models onto ``device``. Called once, before the first score and never in ``predict``.

        By then everything that is checked at the start has been, of the other rewards and of the algorithm too.
        """

    def score(self, rollout: Rollout) -> Tensor:
        """One number for each sample, (B,), NaN where a sample cannot be scored.

        Args:
            rollout: B samples with ``media`` of the kind in :attr:`requires`, finite and in [0, 1], on the reward's
                device. Its ``rewards`` is empty; for every name in :attr:`parts` a subclass puts (B,) figures there,
                which are logged as ``<reward>/<name>`` and have no weight. NaN there says that a figure does not apply.
        """
        raise NotImplementedError(f"{type(self).__name__} must write `score`")

    # -- Lightning ----------------------------------------------------------------------------------------------------

    def setup(self, trainer: L.Trainer, module: Any, stage: str) -> None:
        """Check that it fits the model, the prompts and the other rewards."""
        self._check_names(trainer)
        kind = module.policy.kind if self.requires != "any" else "any"
        if kind != self.requires:
            raise ValueError(
                f"the reward {self.name} ({type(self).__name__}) scores {self.requires}s, but the policy "
                f"{type(module.policy).__name__} makes {kind}s: use a reward for {kind}s or another policy"
            )
        self._check_sources(trainer)

    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Load it, now that the start-up checks of all rewards have passed: models may take minutes."""
        self._ensure_loaded(trainer)

    def on_validation_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Load it, if this is not within ``fit``."""
        self._ensure_loaded(trainer)

    def on_test_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Load it."""
        self._ensure_loaded(trainer)

    @torch.no_grad()
    def on_rollout_batch_end(self, trainer: L.Trainer, module: L.LightningModule, rollout: Rollout) -> None:
        """Fill ``rollout.rewards``, (B,) float32 on the media's device, NaN where not scored, and ``reward_specs``."""
        device = self._ensure_loaded(trainer)
        usable = check_media(rollout, self.requires, f"the reward {self.name}").cpu()
        spec = self.spec
        due = torch.tensor([spec.applies(source) for source in rollout.sources], dtype=torch.bool)
        columns = torch.full((len(rollout), 1 + len(self.parts)), math.nan, dtype=torch.float32)
        error: Exception | None = None
        # Scores keep their digits in a run that is half precision elsewhere.
        with torch.autocast(device.type, enabled=False), _default_dtype(torch.float32):
            seen = rollout.without("reward_specs")
            seen.transitions, seen.rewards = {}, {}
            todo = (due & usable).nonzero()[:, 0]
            for rows in todo.split(self.batch_size or len(todo)) if len(todo) else ():
                columns[rows], raised = self._columns(seen[rows])
                error = error or raised
        columns[:, 0] = columns[:, 0] * self.scale + self.shift
        columns[~columns.isfinite()] = math.nan
        missing = due & columns[:, 0].isnan()
        broken = due & ~usable
        self._account(missing, broken, due, error)
        if broken.any():
            self._warn("media", f"the media of {flaws(rollout.media, usable)}; they are masked")
        names = [self.name, *(f"{self.name}/{part}" for part in self.parts)]
        columns = columns.to(rollout.media.device)
        for i, name in enumerate(names):
            rollout.rewards[name] = columns[:, i]
            rollout.reward_specs[name] = spec if i == 0 else RewardSpec(0.0, None, spec.applies_to)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _ensure_loaded(self, trainer: L.Trainer) -> torch.device:
        if self._loaded_on is None:
            device = trainer.strategy.root_device if self.device == "auto" else torch.device(self.device)
            # Weights made in inference mode would stay unusable outside of it, as in a `fit` that follows a `validate`.
            with torch.inference_mode(False):
                self.load(device)
            self._loaded_on = device
        return self._loaded_on

    def _check_names(self, trainer: L.Trainer) -> None:
        others = [c.name for c in trainer.callbacks if isinstance(c, Reward) and c is not self]  # type: ignore[attr-defined]
        if self.name in others:
            why = "another reward has it"
        elif self.name in _TAKEN_NAMES:
            why = f"`{self.name}` is a figure of all rewards together"
        elif not self.name:
            why = "it is empty"
        elif "/" in self.name:
            why = "what follows `/` is a part of a reward"
        else:
            why = ""
        if why:
            raise ValueError(f"{type(self).__name__} cannot have the name {self.name!r}: {why}")
        if taken := [part for part in self.parts if not part or part in _TAKEN_PARTS]:
            raise ValueError(
                f"{type(self).__name__} cannot have a part {taken[0]!r}: "
                + (f"`reward/{self.name}/{taken[0]}` is logged of every reward" if taken[0] else "it is empty")
            )

    def _check_sources(self, trainer: L.Trainer) -> None:
        data = trainer.datamodule  # type: ignore[attr-defined]
        if self.applies_to is None or not isinstance(data, RolloutDataModule):
            return
        known = {p.source for p in [*data.prompts, *data.val_prompts, *data.test_prompts, *data.predict_prompts]}
        if unknown := sorted(set(self.applies_to) - known):
            raise ValueError(
                f"applies_to of the reward {self.name} names {', '.join(map(repr, unknown))}, but the prompts have the "
                f"sources {', '.join(map(repr, sorted(known)))}"
            )

    def _columns(self, rollout: Rollout) -> tuple[Tensor, Exception | None]:
        """Score and parts (B, 1 + parts), and what was raised on the way; a chunk that fails is taken apart."""
        part = rollout.to(self._loaded_on)
        try:
            score = self.score(part)
        except Exception as e:
            if len(rollout) == 1:
                return torch.full((1, 1 + len(self.parts)), math.nan, dtype=torch.float32), e
            self._warn("chunk", f"scoring {len(rollout)} samples at once failed, so they are scored one by one: {e!r}")
            singles = [self._columns(rollout[i : i + 1]) for i in range(len(rollout))]
            return torch.cat([c for c, _ in singles]), next((e for _, e in singles if e), None)
        if set(part.rewards) != set(self.parts):
            raise ValueError(
                f"{type(self).__name__}.score noted the figures {sorted(part.rewards)}, but the class declares in "
                f"`parts` {sorted(self.parts)}"
            )
        columns = [score, *(part.rewards[name] for name in self.parts)]
        for column in columns:
            got = tuple(column.shape) if isinstance(column, Tensor) else type(column).__name__
            if got != (len(rollout),):
                raise ValueError(
                    f"{type(self).__name__}.score must give a tensor ({len(rollout)},), one number a sample; got {got}"
                )
        return torch.stack([c.float().cpu() for c in columns], 1), None

    def _account(self, missing: Tensor, broken: Tensor, due: Tensor, error: Exception | None) -> None:
        if not self._proven and due.any():
            if (missing & (broken | (error is not None))).sum() == due.sum():
                raise RuntimeError(
                    f"the reward {self.name} could not score any of the first {int(due.sum())} samples: "
                    + (f"{error!r}" if error else "their media are not finite, or not in [0, 1]")
                ) from error
            self._proven = True
        if error is not None:
            self._warn("error", f"a sample could not be scored and is masked: {error!r}")
        if error is None and missing.sum() > broken.sum():
            self._warn("score", "a score is not finite; the sample is masked")

    def _warn(self, about: str, text: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            rank_zero_warn(f"reward {self.name}: {text} (said once; see `reward/failed` for how many)")


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Has tensors made in that dtype: in a run in half precision Lightning's steps make them in half precision."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class FunctionReward(Reward):
    """A plain function as a reward.

    Args:
        function: takes a :class:`~lit_diffrl.rollouts.Rollout` of B samples and gives (B,) scores; in a config its
            import path.
        kwargs: see :class:`Reward`.
    """

    def __init__(self, function: Callable[[Rollout], Tensor], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.function = function
        self.name = getattr(function, "__name__", self.name).strip("<>")

    def score(self, rollout: Rollout) -> Tensor:
        """What the function says."""
        return self.function(rollout)


def as_reward(name: str, obj: Reward | Callable[[Rollout], Tensor]) -> Reward:
    """A reward of that name.

    Args:
        name: what it is logged as.
        obj: a reward, which is renamed, or a function of a rollout.

    Raises:
        TypeError: for anything else, a class of rewards included.
    """
    if isinstance(obj, type) or not (isinstance(obj, Reward) or callable(obj)):
        raise TypeError(
            f"the reward {name!r} is {obj!r}; it must be a Reward or a function of a Rollout that gives (B,)"
        )
    reward = obj if isinstance(obj, Reward) else FunctionReward(obj)
    reward.name = name
    return reward
