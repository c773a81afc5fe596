"""Trains the picture codec: an AutoencoderTiny that halves each side twice, 3x32x32 pixels to 4x8x8 latents."""

import random

import torch
from diffusers import AutoencoderTiny
from torch import Tensor
from world import by_kind, render, render_dense, sample_compositions

from lit_diffrl.callbacks.rewards.composition import KINDS, score

_DENSE, _SPARSE = 6000, 2500  # pool of pictures: crowded ones hold far more signal than those of the prompts
_LATENT_NOISE = 0.05
_LATENT_WEIGHT = 1e-2  # keeps the latents centred and their variance near one


def make_vae() -> AutoencoderTiny:
    """An untrained codec with about 100 thousand parameters."""
    return AutoencoderTiny(
        encoder_block_out_channels=(24, 24, 24),
        decoder_block_out_channels=(24, 24, 24),
        latent_channels=4,
        num_encoder_blocks=(0, 1, 1),
        num_decoder_blocks=(2, 1, 0),
    )


def train_vae(steps: int, seed: int, *, batch: int = 12, lr: float = 2e-3, report_every: int = 500) -> AutoencoderTiny:
    """Trains the codec and sets its scaling and shift.

    Scaled latents of the training pictures have mean zero and variance one; those of the emptier pictures that prompts
    ask for have a standard deviation of about 0.7.
    """
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    pool = (torch.cat([render_dense(_DENSE, generator), _prompt_pictures(_SPARSE, seed)[0]]) * 2 - 1).contiguous(
        memory_format=torch.channels_last
    )
    vae = make_vae().to(memory_format=torch.channels_last).train()
    optimizer = torch.optim.AdamW(vae.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=1e-4)
    decay = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 50, 0.01 + 1.6 * (1 - step / steps))
    )
    for step in range(1, steps + 1):
        pictures = pool[torch.randint(len(pool), (batch,), generator=generator)]
        latents = vae.encode(pictures).latents
        error = vae.decode(latents + _LATENT_NOISE * torch.randn(latents.shape, generator=generator)).sample - pictures
        spread = latents.mean((0, 2, 3)).square() + (latents.square().mean((0, 2, 3)) - 1).clamp(min=0)
        loss = error.abs().mean() + 4 * error.square().mean() + _LATENT_WEIGHT * spread.mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        decay.step()
        if step % report_every == 0 or step == steps:
            print(f"vae step {step}: loss {loss.item():.4f}, strict {ceiling(vae, seed + 1)['strict']:.3f}", flush=True)
    with torch.no_grad():
        latents = torch.cat([vae.encode(part).latents for part in pool.split(500)])
    vae.register_to_config(scaling_factor=1 / latents.std().item(), shift_factor=latents.mean().item())
    return vae.eval()


@torch.no_grad()
def ceiling(vae: AutoencoderTiny, seed: int, number: int = 400) -> dict[str, float]:
    """Mean scores of encoded and decoded true pictures: the best that a model on top of this codec can reach."""
    pictures, wanted = _prompt_pictures(number, seed)
    decoded = vae.decode(vae.encode(pictures * 2 - 1).latents).sample
    return {name: values.nanmean().item() for name, values in score((decoded + 1) / 2, wanted).items()}


def _prompt_pictures(number: int, seed: int) -> tuple[Tensor, list]:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    wanted = sample_compositions(number, dict.fromkeys(KINDS, 1.0), by_kind("train"), rng)
    return render(wanted, generator), wanted
