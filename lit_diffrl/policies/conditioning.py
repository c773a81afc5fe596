"""Prompt embeddings, each made once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Conditioning = dict[str, Tensor]

# Always so many prompts at once: the last digits of an embedding depend on the size of its batch (not on its
# neighbours), and a resumed run, which meets prompts in other company, must find the same ones.
_BATCH = 8


class PromptCache:
    """Embeddings of prompts on the CPU, the least recently used forgotten first.

    Text encoders are frozen, so a prompt's embedding never changes, and rollouts need to carry no embeddings at all.

    Args:
        encode: embeds a list of prompts into tensors that lead with the prompt.
        capacity: bytes to keep; the prompts of one call are kept in any case.
    """

    def __init__(self, encode: Callable[[list[str]], Conditioning], capacity: int = 2 * 2**30) -> None:
        self.encode = encode
        self.capacity = capacity
        self.entries: OrderedDict[str, Conditioning] = OrderedDict()
        self.size = 0

    @torch.no_grad()
    def __call__(self, prompts: Sequence[str], device: torch.device) -> Conditioning:
        """Embeddings of ``prompts``: tensors (B, ...) on ``device``, zero-padded where lengths differ."""
        missing = [p for p in dict.fromkeys(prompts) if p not in self.entries]
        for first in range(0, len(missing), _BATCH):
            batch = missing[first : first + _BATCH]
            encoded = {k: x.cpu() for k, x in self.encode(batch + batch[-1:] * (_BATCH - len(batch))).items()}
            for i, prompt in enumerate(batch):
                self.entries[prompt] = {k: x[i].clone() for k, x in encoded.items()}
                self.size += _bytes(self.entries[prompt])
        for prompt in dict.fromkeys(prompts):
            self.entries.move_to_end(prompt)
        rows = [self.entries[p] for p in prompts]
        while self.size > self.capacity and len(self.entries) > len(set(prompts)):
            self.size -= _bytes(self.entries.popitem(last=False)[1])
        return {k: _pad_stack([row[k] for row in rows]).to(device, non_blocking=True) for k in rows[0]}


def _bytes(entry: Conditioning) -> int:
    return sum(x.nbytes for x in entry.values())


def _pad_stack(rows: list[Tensor]) -> Tensor:
    """Stack rows whose first dimension, the tokens, may differ."""
    if len({len(r) if r.ndim else 0 for r in rows}) == 1:
        return torch.stack(rows)
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
