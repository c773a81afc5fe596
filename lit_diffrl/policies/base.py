"""The contract between an algorithm and a model family: what a diffusers pipeline can do for reinforcement learning."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from lit_diffrl.policies.conditioning import Conditioning
from lit_diffrl.policies.export import export_lora, export_transformer
from lit_diffrl.policies.lora import LoRA
from lit_diffrl.policies.roles import Roles
from lit_diffrl.sampling import Schedule

Grid = Literal["native", "linspace"]
DType = Literal["float32", "bfloat16", "float16"]
# Parts of the names of tensors that belong to roles which training does not move.
_FROZEN = re.compile(r"\.(reference|teacher_\d+)\.")
_EMBEDDED = Path(__file__).parent / "embedded"


@dataclass(frozen=True)
class Size:
    """Size of the media.

    Attributes:
        height: pixels.
        width: pixels.
        num_frames: 1 for images.
    """

    height: int
    width: int
    num_frames: int = 1


class Policy(nn.Module, ABC):
    """A diffusers pipeline as a velocity field: the only place that knows a model family.

    Its latents live in the pipeline's own space (packed where the pipeline packs), its velocity is ``eps - x_0``, its
    timesteps lie in [0, 1000]. Nothing is loaded before :meth:`load`, so a wrong setting is found before a model is.

    Args:
        pretrained: a hub id, the directory of a diffusers pipeline, or ``embedded:shapes``, a small model that ships
            with the package.
        lora: train low-rank adapters instead of all weights.
        dtype: of the frozen weights. Trainable weights are float32 always.
        gradient_checkpointing: recompute activations in the backward pass.
        revision: of a hub id.
    """

    kind: ClassVar[Literal["image", "video"]] = "image"
    lora_targets: ClassVar[tuple[str, ...]] = ()
    components: ClassVar[tuple[str, ...]] = ()

    transformer: Any  # a diffusers model; typed loosely for its `config` and adapter methods
    roles: Roles

    def __init__(
        self,
        pretrained: str,
        lora: LoRA | None = None,
        dtype: DType = "float32",
        gradient_checkpointing: bool = False,
        revision: str | None = None,
    ) -> None:
        super().__init__()
        self.pretrained = locate(pretrained)
        self.lora = lora
        self.dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]
        if lora is None and self.dtype != torch.float32:
            raise ValueError(
                f"policy.dtype is {dtype!r} without LoRA: trainable weights stay in float32; set policy.lora, or dtype "
                "float32 with trainer.precision bf16-mixed"
            )
        self.gradient_checkpointing = gradient_checkpointing
        self.revision = revision
        self.pipeline: Any = None

    # -- what a family writes --------------------------------------------------------------------------------------

    @abstractmethod
    def load_pipeline(self) -> Any:
        """The diffusers pipeline with its weights, in ``self.dtype``."""

    @abstractmethod
    def native_size(self) -> Size:
        """What the checkpoint was trained for."""

    @abstractmethod
    def encode_prompts(self, prompts: list[str]) -> Conditioning:
        """What the network is told of each prompt: tensors that lead with the prompt, masks included."""

    @abstractmethod
    def latent_shape(self, size: Size) -> tuple[int, ...]:
        """Shape of the latents of one sample.

        Raises:
            ValueError: for a size that the model cannot make, naming the nearest ones that it can.
        """

    @abstractmethod
    def schedule(self, num_steps: int, size: Size, grid: Grid = "native") -> Schedule:
        """The checkpoint's own grid of noise levels, or its shift of evenly spaced ones (``linspace``)."""

    @abstractmethod
    def predict(self, latents: Tensor, timestep: Tensor, cond: Conditioning, size: Size) -> Tensor:
        """One forward of the transformer in use: (B, ...) velocity ``eps - x_0``, in the network's precision."""

    @abstractmethod
    def decode(self, latents: Tensor, size: Size) -> Tensor:
        """Media of latents: float32 in [0, 1], images (B, C, H, W) or videos (B, T, C, H, W)."""

    # -- what all families share -----------------------------------------------------------------------------------

    def load(self) -> None:
        """Load the pipeline and mark what is trained. A second call does nothing."""
        if self.pipeline is not None:
            return
        self.pipeline = self.load_pipeline()
        transformer = self.pipeline.transformer
        for name in self.components:
            if (component := getattr(self.pipeline, name, None)) is not None:
                component.requires_grad_(False).eval()
        transformer.requires_grad_(self.lora is None)
        if self.lora is not None:
            self.lora.attach(transformer, self.lora_targets)
        if self.gradient_checkpointing:
            transformer.enable_gradient_checkpointing()
        self.transformer = transformer
        self.roles = Roles(transformer, self.lora)

    def prepare_latents(self, noise: Tensor, size: Size) -> Tensor:
        """Draws of :meth:`latent_shape` in the space of the loop; the same where the pipeline does not pack."""
        return noise

    def velocity(
        self,
        latents: Tensor,
        timestep: Tensor,
        cond: Conditioning,
        uncond: Conditioning | None = None,
        guidance_scale: float = 1.0,
        *,
        size: Size,
    ) -> Tensor:
        """The guided velocity.

        Args:
            latents: (B, ...) float32.
            timestep: (B,) float32 in [0, 1000].
            cond: of the prompts.
            uncond: of the negative prompts, needed where ``guidance_scale`` is not 1.
            guidance_scale: w in ``v_uncond + w (v_cond - v_uncond)``; 1 is no guidance and one forward a row.
            size: of the media.

        Returns:
            (B, ...) float32.

        Raises:
            ValueError: if guidance lacks the negative prompts.
        """
        if guidance_scale == 1:
            return self.predict(latents, timestep, cond, size).float()
        if uncond is None:
            raise ValueError(f"guidance_scale is {guidance_scale}, but no negative prompts were encoded: give `uncond`")
        both = {k: torch.cat([uncond[k], cond[k]]) for k in cond}
        v_uncond, v_cond = self.predict(
            latents.repeat(2, *[1] * (latents.ndim - 1)), timestep.repeat(2), both, size
        ).chunk(2)
        return (v_uncond + guidance_scale * (v_cond - v_uncond)).float()

    @property
    def device(self) -> torch.device:
        """Where the transformer is."""
        return next(self.transformer.parameters()).device

    def component(self, name: str) -> Any:
        """A frozen part of the pipeline, on the device of the transformer.

        These are no sub-modules: they are in no checkpoint, optimiser or wrapper.
        """
        return getattr(self.pipeline, name).to(self.device)

    def export(self, folder: str | Path) -> Path:
        """Write the trained weights in diffusers format.

        Args:
            folder: made where it does not exist.

        Returns:
            What was written: the file of the adapter, or the folder of the transformer.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if self.lora is not None:
            return export_lora(self.pipeline, folder)
        return export_transformer(self.transformer, folder)

    def trainable_state(self, state: dict[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
        """The part of a state dict of this module that training changes: what a checkpoint needs."""
        moving = {k: v for k, v in state.items() if not _FROZEN.search(k)}
        if self.lora is None:
            return moving
        return {k: v for k, v in moving.items() if not k.startswith(prefix) or ".lora_" in k}


def locate(pretrained: str) -> str:
    """Check the name of a model before anything is loaded.

    Args:
        pretrained: a hub id, a pipeline directory, or ``embedded:<name>``.

    Returns:
        A hub id or a directory.

    Raises:
        ValueError: for an embedded model that does not exist.
        FileNotFoundError: for what is neither a directory with a ``model_index.json`` nor looks like a hub id.
    """
    if pretrained.startswith("embedded:"):
        folder = _EMBEDDED / pretrained.removeprefix("embedded:")
        if not (folder / "model_index.json").is_file():
            known = sorted(p.parent.name for p in _EMBEDDED.glob("*/model_index.json"))
            raise ValueError(f"policy.pretrained is {pretrained!r}; the embedded models are {known}")
        return str(folder)
    folder = Path(pretrained).expanduser()
    if folder.is_dir():
        if not (folder / "model_index.json").is_file():
            raise FileNotFoundError(
                f"policy.pretrained {pretrained!r} has no model_index.json: not a diffusers pipeline"
            )
        return str(folder)
    if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", pretrained):
        raise FileNotFoundError(
            f"policy.pretrained {pretrained!r} is neither a directory nor a hub id like 'owner/name'"
        )
    return pretrained
