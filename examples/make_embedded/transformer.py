"""Pre-trains the transformer and, jointly, the two text encoders by flow matching."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.nn.functional as F
from diffusers import AutoencoderTiny, SD3Transformer2DModel
from diffusers.models.attention_processor import Attention, JointAttnProcessor2_0
from pipeline import encode, make_text_encoder, make_tokenizer, make_transformer, token_ids
from torch import Tensor, nn
from transformers import CLIPTokenizer
from world import by_kind, corrupt, placed_caption, render, sample_compositions

from lit_diffrl.callbacks.rewards.composition import RELATIONS, caption


@dataclass(frozen=True)
class Recipe:
    """How the base model is pre-trained.

    Attributes:
        steps: optimizer steps.
        batch: pictures in a step.
        lr: peak learning rate; warm-up over ``warmup`` steps, then a cosine to 2 %.
        warmup: steps of linear warm-up.
        ema: decay of the averaged weights, which are the ones that ship.
        pictures: number of different training pictures.
        placed: number of further pictures of one object whose caption says in which half it lies, as in 'a red square
            left on black'.
        simple: steps at the start with only these pictures. In 'a red square left of a blue triangle' neither the order
            of the words nor the relation says anything alone: a model that has not seen the simpler captions first
            stays at chance for thousands of steps.
        shares: how often each kind of prompt occurs.
        level: mean of the logit of the noise level, whose spread is one. Where objects go, and how many, is decided
            at high levels: between about 0.65 and 0.95.
        simple_level: the same in the simple steps; where a single object goes is decided even higher.
        clean: part of the steps, at the start, in which all captions are true.
        corrupted: share of the captions, by kind, with one wrong attribute after that. Real captions are wrong at times
            as well; it leaves the base model imperfectly aligned with its prompts, which is what reinforcement
            learning mends.
        dropped: share of empty captions, for classifier-free guidance.
        long_every: every so many steps the silent T5 token counts as :data:`T5_TOKENS` of them.
        seed: of everything.
    """

    steps: int = 11_500
    batch: int = 64
    lr: float = 2e-3
    warmup: int = 200
    ema: float = 0.999
    pictures: int = 50_000
    placed: int = 12_000
    simple: int = 1500
    shares: dict[str, float] = field(
        default_factory=lambda: {"single": 0.07, "count": 0.15, "pair": 0.33, "relation": 0.45}
    )
    level: float = 1.3
    simple_level: float = 2.0
    clean: float = 0.61
    corrupted: dict[str, float] = field(
        default_factory=lambda: {"single": 0.0, "count": 0.15, "pair": 0.2, "relation": 0.2}
    )
    dropped: float = 0.1
    long_every: int = 6
    seed: int = 0


T = TypeVar("T")
T5_TOKENS = 256  # the pipeline's default max_sequence_length


class CountedTailAttention(JointAttnProcessor2_0):
    """Joint attention whose last context token stands for ``count`` identical ones.

    Identical tokens stay identical through the layers, so adding log(count) to the logit of one is the same as feeding
    them all, at a fraction of the cost. For training only: it makes the model work with any ``max_sequence_length``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 1

    def __call__(
        self, attn: Attention, hidden_states: Tensor, encoder_hidden_states: Tensor, **_: object
    ) -> tuple[Tensor, Tensor]:
        """Attends from and to the picture's tokens (B, N, D) and the context's (B, L, D), and returns both updates."""

        def heads(x: Tensor, norm: nn.Module | None = None) -> Tensor:
            x = x.unflatten(-1, (attn.heads, -1)).transpose(1, 2)
            return x if norm is None else norm(x)

        text, pictures = encoder_hidden_states, hidden_states.shape[1]
        query = [heads(attn.to_q(hidden_states), attn.norm_q), heads(attn.add_q_proj(text), attn.norm_added_q)]
        key = [heads(attn.to_k(hidden_states), attn.norm_k), heads(attn.add_k_proj(text), attn.norm_added_k)]
        value = [heads(attn.to_v(hidden_states)), heads(attn.add_v_proj(text))]
        bias = None
        if self.count > 1:
            bias = hidden_states.new_zeros(pictures + text.shape[1])
            bias[-1] = math.log(self.count)
            bias = bias.view(1, 1, 1, -1)
        q, k, v = (torch.cat(parts, dim=2) for parts in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2)
        update, text_update = out[:, :pictures], out[:, pictures:]
        return attn.to_out[0](update), text_update if attn.context_pre_only else attn.to_add_out(text_update)


class Average:
    """Exponential moving average of parameters, with a short memory at first."""

    def __init__(self, parameters: list[nn.Parameter], decay: float) -> None:
        self.parameters: list[Tensor] = list(parameters)
        self.decay, self.steps = decay, 0
        self.values = [p.detach().clone() for p in parameters]

    @torch.no_grad()
    def update(self) -> None:
        """Takes the current parameters into account."""
        self.steps += 1
        torch._foreach_lerp_(self.values, self.parameters, 1 - min(self.decay, self.steps / (self.steps + 20)))

    @torch.no_grad()
    def swap(self) -> None:
        """Exchanges the parameters and their averages."""
        for parameter, value in zip(self.parameters, self.values, strict=True):
            current = parameter.clone()
            parameter.copy_(value)
            value.copy_(current)


@dataclass
class Base:
    """The parts that are trained."""

    transformer: SD3Transformer2DModel
    encoders: nn.ModuleList
    tokenizer: CLIPTokenizer


@torch.no_grad()
def training_data(vae: AutoencoderTiny, recipe: Recipe) -> tuple[Tensor, list[str], list[str]]:
    """Scaled latents (N, 4, 8, 8) of all training pictures, their true captions, and their captions with errors."""
    rng, generator = random.Random(recipe.seed), torch.Generator().manual_seed(recipe.seed)
    liar = random.Random(recipe.seed + 1)
    table = by_kind("train")
    chunks = range(0, recipe.pictures, 1000)
    shown = [w for _ in chunks for w in sample_compositions(1000, recipe.shares, table, rng)][: recipe.pictures]
    told = [corrupt(w, liar) if liar.random() < recipe.corrupted[w.kind] else w for w in shown]
    placed = [rng.choice(table["single"]) for _ in range(recipe.placed)]
    sides = [rng.choice(RELATIONS) for _ in placed]
    latents = [vae.encode(render(part, generator) * 2 - 1).latents for part in _chunks(shown)]
    for part, where in zip(_chunks(placed), _chunks(sides), strict=True):
        latents.append(vae.encode(render(part, generator, where) * 2 - 1).latents)
    simple = [placed_caption(w, side) for w, side in zip(placed, sides, strict=True)]
    scaled = (torch.cat(latents) - vae.config.shift_factor) * vae.config.scaling_factor
    return scaled, [caption(w) for w in shown] + simple, [caption(w) for w in told] + simple


def _chunks(items: list[T], size: int = 1000) -> list[list[T]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def train_base(
    vae: AutoencoderTiny, recipe: Recipe, report: Callable[[int, float, Base], None], report_every: int = 1000
) -> Base:
    """Pre-trains transformer and text encoders; returns their averaged weights.

    Args:
        vae: the trained codec.
        recipe: what to do.
        report: called every ``report_every`` steps with the step, the mean loss since the last call and the parts,
            which then hold the averaged weights.
        report_every: steps between reports.
    """
    torch.manual_seed(recipe.seed)
    tokenizer = make_tokenizer()
    base = Base(make_transformer(), nn.ModuleList(make_text_encoder(tokenizer) for _ in range(2)), tokenizer)
    latents, true, told = training_data(vae, recipe)
    true_ids, told_ids = token_ids(tokenizer, true), token_ids(tokenizer, told)
    empty = token_ids(tokenizer, [""])

    attention = CountedTailAttention()
    base.transformer.set_attn_processor(attention)
    parameters = [p for module in (base.transformer, base.encoders) for p in module.parameters()]
    average = Average(parameters, recipe.ema)
    optimizer = torch.optim.AdamW(parameters, lr=recipe.lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True)

    def rate(step: int) -> float:
        cosine = 0.5 * (1 + math.cos(math.pi * step / recipe.steps))
        return min(1.0, (step + 1) / recipe.warmup) * max(0.02, cosine)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    generator = torch.Generator().manual_seed(recipe.seed + 1)
    losses: list[Tensor] = []
    for step in range(1, recipe.steps + 1):
        attention.count = T5_TOKENS if step % recipe.long_every == 0 else 1
        ids = true_ids if step <= recipe.clean * recipe.steps else told_ids
        simple = step <= recipe.simple
        start = recipe.pictures if simple else 0
        pick = torch.randint(start, len(latents), (recipe.batch,), generator=generator)
        silent = torch.rand(recipe.batch, 1, generator=generator) < recipe.dropped
        mean = recipe.simple_level if simple else recipe.level
        level = torch.sigmoid(mean + torch.randn(recipe.batch, generator=generator))
        loss = flow_loss(base, latents[pick], torch.where(silent, empty, ids[pick]), level, generator)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        average.update()
        losses.append(loss.detach())
        if step % report_every == 0 and step < recipe.steps:
            average.swap()
            report(step, torch.stack(losses).mean().item(), base)
            average.swap()
            losses.clear()
    average.swap()
    return base


def flow_loss(base: Base, clean: Tensor, ids: Tensor, level: Tensor, generator: torch.Generator) -> Tensor:
    """Mean squared error of the velocity, noise - clean, at noise levels (B,) in [0, 1]."""
    noise = torch.randn(clean.shape, generator=generator)
    mixed = torch.lerp(clean, noise, level.view(-1, 1, 1, 1))
    context, pooled = encode(base.encoders, ids)
    velocity = base.transformer(
        hidden_states=mixed,
        encoder_hidden_states=context,
        pooled_projections=pooled,
        timestep=level * 1000,
        return_dict=False,
    )[0]
    return F.mse_loss(velocity, noise - clean)
