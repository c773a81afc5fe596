"""One backbone in several roles: the policy in training, and the weights it is compared with.

With LoRA a role is a further adapter, and ``reference`` is the adapter switched off. With full fine-tuning a role is a
copy of the transformer, made only when an algorithm asks for it. A teacher is an adapter or a transformer of its own,
whichever it was trained as.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lit_diffrl.policies.lora import LoRA

DEFAULT, REFERENCE = "default", "reference"


class Roles(nn.Module):
    """The weights behind the names ``default``, ``reference``, ``old``, ``ema`` and ``teacher_<i>``.

    Args:
        transformer: in training, with its ``default`` adapter where ``lora`` is given.
        lora: how adapters are made; ``None`` for full fine-tuning.
    """

    def __init__(self, transformer: nn.Module, lora: LoRA | None = None) -> None:
        super().__init__()
        self.lora = lora
        self.copies = nn.ModuleDict()
        self.adapters: list[str] = []
        # In tuples, which do not register them: the transformer belongs to the policy.
        self._transformer = (transformer,)
        self._active = (transformer,)

    @property
    def active(self) -> Any:
        """The transformer to call."""
        return self._active[0]

    @property
    def names(self) -> list[str]:
        """The roles that can be used."""
        reference = [REFERENCE] if self.lora is not None else []
        return [DEFAULT, *reference, *self.adapters, *self.copies]

    def add(self, name: str) -> None:
        """Make a role, a frozen copy of the present weights. Making it twice does nothing."""
        if name in self.names:
            return
        transformer: Any = self._transformer[0]
        if self.lora is None:
            self.copies[name] = copy.deepcopy(transformer).requires_grad_(False)
            return
        config = transformer.peft_config[DEFAULT]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Already found a `peft_config` attribute")  # that is the point
            transformer.add_adapter(copy.deepcopy(config), adapter_name=name)
        transformer.set_adapter(DEFAULT)  # the newest adapter is the active one
        self.adapters.append(name)
        for ours, theirs in self._pairs(name):
            theirs.data = ours.data.clone()
            theirs.requires_grad_(False)

    def add_copy(self, name: str, transformer: nn.Module) -> None:
        """Make a role of a transformer of its own."""
        self.copies[name] = transformer.requires_grad_(False).eval()

    def add_adapter(
        self,
        name: str,
        state: dict[str, Tensor],
        metadata: dict[str, Any] | None,
        base: Callable[[], nn.Module],
    ) -> None:
        """Make a role of a trained adapter.

        Args:
            name: of the role.
            state: tensors of the adapter in peft's format, each name led by ``transformer.``.
            metadata: its configuration, each key led by ``transformer.``; read off the tensors where there is none.
            base: loads the model before training, on which the adapter sits where the student has none of its own.

        Raises:
            ValueError: if a tensor of it fits no layer, or one is lacking.
        """
        transformer: Any = self._transformer[0]
        host: Any = transformer if self.lora is not None else base()
        if not state:
            raise ValueError("it holds no tensors")
        given = {k.removeprefix("transformer.").replace(".weight", f".{name}.weight"): k for k in state}
        if foreign := [k for k in state if not k.startswith("transformer.")]:
            raise ValueError(f"{len(foreign)} of its {len(state)} tensors fit no layer, such as {foreign[0]}")
        swapped = {k: k.replace("lora_A", "lora_B") if "lora_A" in k else k.replace("lora_B", "lora_A") for k in given}
        if single := [k for k in swapped.values() if k not in given]:
            raise ValueError(f"{len(single)} of {len(single) + len(given)} tensors are lacking, such as {min(single)}")
        try:
            # A deep copy: loading takes entries out of it.
            host.load_lora_adapter(
                dict(state), prefix="transformer", adapter_name=name, metadata=copy.deepcopy(metadata)
            )
        except RuntimeError as e:  # tensors of another size
            raise ValueError(str(e)) from e
        found = {k: p for k, p in host.named_parameters() if f".{name}." in k}
        strays = [given[k] for k in given if k not in found]
        if strays:
            raise ValueError(f"{len(strays)} of its {len(state)} tensors fit no layer, such as {strays[0]}")
        if lacking := sorted(set(found) - set(given)):
            raise ValueError(f"{len(lacking)} of {len(found)} tensors are lacking, such as {lacking[0]}")
        for parameter in found.values():
            parameter.data = parameter.data.float()
        if self.lora is None:
            self.add_copy(name, host)
            return
        transformer.set_adapter(DEFAULT)  # the newest adapter is the active one
        self.adapters.append(name)
        for parameter in found.values():
            parameter.requires_grad_(False)

    @contextmanager
    def use(self, name: str) -> Iterator[None]:
        """Run the transformer in a role.

        Raises:
            KeyError: for a role that was not added.
            RuntimeError: where gradients are recorded: a backward pass that recomputes activations would do so with
                whichever weights are then active.
        """
        if name not in self.names:
            raise KeyError(f"no role {name!r}; there are {self.names}")
        if name == DEFAULT:
            yield
            return
        if torch.is_grad_enabled():
            raise RuntimeError(f"the role {name!r} can be used under torch.no_grad() only")
        if name in self.copies:
            before, self._active = self._active, (self.copies[name],)
            try:
                yield
            finally:
                self._active = before
            return
        layers = _tuner_layers(self._transformer[0])
        states = [(layer._active_adapter, layer._disable_adapters) for layer in layers]
        try:
            # Not set_adapter() or disable_adapters(), which change requires_grad.
            for layer in layers:
                layer._disable_adapters = name == REFERENCE
                layer._active_adapter = [DEFAULT if name == REFERENCE else name]
            yield
        finally:
            for layer, (active, disabled) in zip(layers, states):
                layer._active_adapter, layer._disable_adapters = active, disabled

    @torch.no_grad()
    def follow(self, name: str, decay: float) -> None:
        """Move a role towards the policy in training: ``role = decay role + (1 - decay) default``."""
        pairs = list(self._pairs(name))
        torch._foreach_lerp_([theirs.data for _, theirs in pairs], [ours.data for ours, _ in pairs], 1 - decay)

    def _pairs(self, name: str) -> Iterator[tuple[Tensor, Tensor]]:
        """The trained tensors of the policy, each with its counterpart in the role."""
        ours = dict(self._transformer[0].named_parameters())
        if self.lora is None:
            theirs = dict(self.copies[name].named_parameters())
            yield from ((ours[k], theirs[k]) for k in ours)
        else:
            yield from (
                (p, ours[k.replace(f".{DEFAULT}.", f".{name}.")]) for k, p in ours.items() if f".{DEFAULT}." in k
            )


def _tuner_layers(transformer: nn.Module) -> list[Any]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [m for m in transformer.modules() if isinstance(m, BaseTunerLayer)]
