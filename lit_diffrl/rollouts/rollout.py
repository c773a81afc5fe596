"""What a policy drew, and what was noted of it on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class RewardSpec(NamedTuple):
    """How a reward enters the sum.

    Attributes:
        weight: its factor; 0 for one that is only watched.
        gate: where the combination is ``gated``, the least score that passes; ``None`` for a reward that is no gate.
        applies_to: the prompt sources that it scores; ``None`` for all. Elsewhere it is absent, which is not a failure.
    """

    weight: float = 1.0
    gate: float | None = None
    applies_to: list[str] | None = None

    def applies(self, source: str) -> bool:
        """Whether a prompt of this source is scored."""
        return self.applies_to is None or source in self.applies_to


class Rollout:
    """B samples with their record. Every tensor leads with the sample dimension, every list has length B.

    Attributes:
        prompts: texts, one a sample.
        sources: which task each prompt belongs to, "" where the prompt file names none.
        metadata: what else the prompt file says, one dict a sample.
        sample_ids: (B,) int64, the number of the sample in its round, over all ranks.
        group_ids: (B,) int64, the number of the draw of the prompt in its round: two draws of one text are two groups.
        seeds: (B,) int64, from which all draws of the sample come.
        media: images (B, C, H, W) or videos (B, T, C, H, W), float32 in [0, 1]; absent once it is scored and learnt
            from.
        fps: frames a second of videos.
        latents: (B, ...) float32, the final latents, where the algorithm trains on clean samples.
        transitions: what an algorithm kept of K steps, name -> (B, K, ...) float32.
        rewards: name -> (B,) float32 as scored, NaN where not scored.
        reward_specs: name -> how the reward enters the sum.
        reward: (B,) float32, the combined reward, NaN where a reward is missing.
        advantages: (B,) float32, 0 where there is no valid reward.
        valid: (B,) bool, which samples have a reward to learn from.
        draws: (B,) int64, in micro-batches only: which of its rows each sample stands for.

    Neither a mapping nor a dataclass, on purpose: half-precision plugins cast every float inside of those, and
    log-probabilities and advantages would lose their digits. Having ``to`` is what moves it to the device.
    """

    prompts: list[str]
    sources: list[str]
    metadata: list[dict[str, Any]]
    sample_ids: Tensor
    group_ids: Tensor
    seeds: Tensor
    media: Tensor
    latents: Tensor
    transitions: dict[str, Tensor]
    rewards: dict[str, Tensor]
    reward_specs: dict[str, RewardSpec]
    reward: Tensor
    advantages: Tensor
    valid: Tensor
    draws: Tensor
    fps: float | None

    def __init__(
        self,
        prompts: Sequence[str],
        *,
        sources: Sequence[str] | None = None,
        metadata: Sequence[dict[str, Any]] | None = None,
        sample_ids: Tensor | None = None,
        group_ids: Tensor | None = None,
        seeds: Tensor | None = None,
        fps: float | None = None,
        **record: Any,
    ) -> None:
        n = len(prompts)
        self.prompts = list(prompts)
        self.sources = list(sources) if sources is not None else [""] * n
        self.metadata = list(metadata) if metadata is not None else [{} for _ in range(n)]
        self.sample_ids = torch.arange(n) if sample_ids is None else sample_ids
        self.group_ids = torch.arange(n) if group_ids is None else group_ids
        self.seeds = torch.zeros(n, dtype=torch.int64) if seeds is None else seeds
        self.fps = fps
        self.transitions = {}
        self.rewards = {}
        self.reward_specs = {}
        self.__dict__.update(record)

    def __len__(self) -> int:
        return len(self.prompts)

    def __contains__(self, field: str) -> bool:
        return field in self.__dict__

    def __getitem__(self, rows: Tensor | slice) -> Rollout:
        """The samples ``rows``: an index tensor (N,) or a slice."""
        index = torch.arange(len(self))[rows] if isinstance(rows, slice) else rows
        picked = index.tolist()
        return self._map(lambda x: x[index.to(x.device)], lambda x: [x[i] for i in picked])

    def rows(self, samples: Tensor, draws: Tensor) -> Rollout:
        """A micro-batch: the samples ``samples`` (N,), each at the one kept step ``draws`` (N,).

        Its ``transitions`` are (N, ...): the step dimension is gone.
        """
        batch = self[samples]
        batch.draws = draws
        batch.transitions = {
            k: x[torch.arange(len(draws), device=x.device), draws.to(x.device)] for k, x in batch.transitions.items()
        }
        return batch

    def without(self, *fields: str) -> Rollout:
        """A copy without the named fields."""
        return Rollout.from_state({k: v for k, v in self.__dict__.items() if k not in fields})

    def is_finite(self) -> Tensor:
        """(B,) bool, which samples have finite latents and transitions."""
        kept = [*self.transitions.values(), *([self.latents] if "latents" in self else [])]
        return torch.stack([torch.ones(len(self)).bool(), *(x.flatten(1).isfinite().all(1) for x in kept)]).all(0)

    def finite(self) -> Rollout:
        """A copy whose latents and transitions hold 0 where they were not finite.

        Samples that went astray have no valid reward and weigh nothing in the loss, but 0 times NaN is NaN in the
        gradient all the same.
        """

        def clean(x: Tensor) -> Tensor:
            return x.nan_to_num(0.0, 0.0, 0.0)

        fields = self.__dict__ | {"transitions": {k: clean(x) for k, x in self.transitions.items()}}
        return Rollout.from_state(fields | ({"latents": clean(self.latents)} if "latents" in self else {}))

    def to(self, *args: Any, **kwargs: Any) -> Rollout:
        """A copy with every tensor moved, as ``Tensor.to`` does; dtypes stay unless one is named."""
        return self._map(lambda x: x.to(*args, **kwargs))

    def state_dict(self) -> dict[str, Any]:
        """Its record in types that a weights-only checkpoint may hold."""
        state = dict(self.__dict__)
        return {**state, "reward_specs": {k: list(s) for k, s in self.reward_specs.items()}}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Rollout:
        """The rollout that :meth:`state_dict` describes."""
        self = cls.__new__(cls)
        self.__dict__.update(state)
        self.reward_specs = {k: RewardSpec(*s) for k, s in state.get("reward_specs", {}).items()}
        return self

    @classmethod
    def cat(cls, parts: Sequence[Rollout]) -> Rollout:
        """The samples of all ``parts``, which must have the same fields."""
        fields = {name: _cat([p.__dict__[name] for p in parts]) for name in parts[0].__dict__}
        return cls.from_state(fields)

    def _map(self, tensors: Callable[[Tensor], Tensor], lists: Callable[[list], list] = lambda x: x) -> Rollout:
        def walk(x: Any) -> Any:
            if isinstance(x, RewardSpec):
                return x
            if isinstance(x, dict):
                return {k: walk(v) for k, v in x.items()}
            return tensors(x) if isinstance(x, Tensor) else lists(x) if isinstance(x, list) else x

        return Rollout.from_state({k: walk(v) for k, v in self.__dict__.items()})


def _cat(parts: list[Any]) -> Any:
    head = parts[0]
    if isinstance(head, dict) and not any(isinstance(v, RewardSpec) for v in head.values()):
        return {k: _cat([p[k] for p in parts]) for k in head}
    if isinstance(head, Tensor):
        return torch.cat(parts)
    return [x for p in parts for x in p] if isinstance(head, list) else head
