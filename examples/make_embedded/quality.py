"""Measures a pipeline with the stock sampler: scores of pictures for held-out prompts, by kind of prompt."""

from collections.abc import Sequence

import torch
from diffusers import StableDiffusion3Pipeline
from pipeline import LATENT_SHAPE
from torch import Tensor

from lit_diffrl.callbacks.rewards.composition import KINDS, Composition, caption, score


@torch.no_grad()
def sample(
    pipe: StableDiffusion3Pipeline,
    prompts: Sequence[str],
    *,
    steps: int = 10,
    guidance: float = 1.0,
    seed: int = 0,
    tokens: int = 1,
    batch: int = 128,
) -> Tensor:
    """Pictures (B, 3, 32, 32) in [0, 1]; the noise depends on the seed and the prompt's place only.

    Args:
        pipe: the pipeline.
        prompts: one for each picture.
        steps: sampling steps.
        guidance: scale of classifier-free guidance; 1 is none.
        seed: of the noise.
        tokens: ``max_sequence_length``.
        batch: pictures at a time.
    """
    noise = torch.randn(len(prompts), *LATENT_SHAPE, generator=torch.Generator().manual_seed(seed))
    parts = [
        pipe(
            prompt=list(prompts[start : start + batch]),
            latents=noise[start : start + batch],
            num_inference_steps=steps,
            guidance_scale=guidance,
            max_sequence_length=tokens,
            output_type="pt",
        ).images
        for start in range(0, len(prompts), batch)
    ]
    return torch.cat(parts)


def quality(
    pipe: StableDiffusion3Pipeline, wanted: Sequence[Composition], **options: float
) -> dict[str, dict[str, tuple[float, float]]]:
    """Mean and standard error of each score, for 'all' and by kind; ``options`` go to :func:`sample`."""
    images = sample(pipe, [caption(w) for w in wanted], **options)  # type: ignore[arg-type]
    scores = score(images, wanted)
    table = {}
    for group in ("all", *KINDS):
        mask = torch.tensor([group in ("all", w.kind) for w in wanted])
        table[group] = {name: _mean(values[mask]) for name, values in scores.items() if mask.any()}
    return table


def _mean(values: Tensor) -> tuple[float, float]:
    values = values[~values.isnan()]
    error = values.std().item() / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return (values.mean().item() if len(values) else float("nan")), error


def line(table: dict[str, dict[str, tuple[float, float]]]) -> str:
    """A row for a Markdown table: strict and soft of all prompts with their errors, strict by kind, and diagnostics."""
    everything = table["all"]
    cells = [f"{mean:.3f} ± {error:.3f}" for mean, error in (everything["strict"], everything["soft"])]
    cells += [f"{table[kind]['strict'][0]:.2f}" if table[kind] else "-" for kind in KINDS]
    cells += [f"{everything[name][0]:.2f}" for name in ("count", "color", "shape", "position")]
    return " | ".join(cells)


HEADER = " | ".join(("strict", "soft", *(f"strict: {kind}" for kind in KINDS), "count", "color", "shape", "position"))
