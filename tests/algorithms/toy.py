"""A policy of twenty weights whose velocity anyone can compute: ``W x + b + t / 1000 + c(prompt)``."""

import torch
from torch import Tensor, nn

from lit_diffrl.policies.base import Policy, Size
from lit_diffrl.policies.roles import Roles
from lit_diffrl.sampling import Schedule

SHAPE = (1, 2, 2)


class ToyPolicy(Policy):
    def __init__(self, sigmas: list[float] | None = None) -> None:
        nn.Module.__init__(self)
        self.lora = None
        self.sigmas = sigmas or [1.0, 0.9, 0.7, 0.4, 0.0]

    def load(self) -> None:
        torch.manual_seed(0)
        self.transformer = nn.Linear(4, 4)
        self.roles = Roles(self.transformer)

    def load_pipeline(self) -> None: ...

    def native_size(self) -> Size:
        return Size(2, 2)

    def encode_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        return {"length": torch.tensor([[float(len(p))] for p in prompts])}

    def latent_shape(self, size: Size) -> tuple[int, ...]:
        return SHAPE

    def schedule(self, num_steps: int, size: Size, grid: str = "native") -> Schedule:
        sigmas = torch.tensor(self.sigmas)
        return Schedule(sigmas, 1000 * sigmas[:-1])

    def predict(self, latents: Tensor, timestep: Tensor, cond: dict[str, Tensor], size: Size) -> Tensor:
        offset = timestep[:, None] / 1000 + 0.1 * cond["length"]
        return (self.roles.active(latents.flatten(1)) + offset).view_as(latents)

    def decode(self, latents: Tensor, size: Size) -> Tensor:
        return latents.sigmoid().expand(-1, 3, -1, -1)

    def move(self, seed: int = 1, size: float = 0.3) -> None:
        """Leave the present weights."""
        generator = torch.Generator().manual_seed(seed)
        for p in self.transformer.parameters():
            p.data += size * torch.randn(p.shape, generator=generator)
