"""Stable Diffusion 3 and 3.5, and the embedded image model, which is one."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from lit_diffrl.policies.base import Conditioning, Grid, Policy, Size
from lit_diffrl.policies.loading import load_diffusers, quiet
from lit_diffrl.sampling import Schedule

# Who tells of prompts that are cut.
_CUTTING = (
    "diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3",
    "transformers.tokenization_utils_base",
)


class SD3Policy(Policy):
    """A ``StableDiffusion3Pipeline``: a joint-attention transformer over two CLIP encoders and T5.

    Args:
        pretrained: see :class:`~lit_diffrl.policies.base.Policy`.
        max_sequence_length: tokens of T5; what its tokenizer takes, and at most 256, where omitted.
        kwargs: see :class:`~lit_diffrl.policies.base.Policy`.
    """

    lora_targets = (
        "attn.to_q",
        "attn.to_k",
        "attn.to_v",
        "attn.to_out.0",
        "attn.add_q_proj",
        "attn.add_k_proj",
        "attn.add_v_proj",
        "attn.to_add_out",
    )
    components = ("vae", "text_encoder", "text_encoder_2", "text_encoder_3")

    def __init__(self, pretrained: str, max_sequence_length: int | None = None, **kwargs: Any) -> None:
        super().__init__(pretrained, **kwargs)
        self.max_sequence_length = max_sequence_length

    def load_pipeline(self) -> Any:  # noqa: D102
        pipeline = load_diffusers("StableDiffusion3Pipeline", self.pretrained, self.dtype, self.revision)
        if self.max_sequence_length is None:
            limit = pipeline.tokenizer_3.model_max_length if pipeline.tokenizer_3 is not None else 256
            self.max_sequence_length = min(256, limit)
        return pipeline

    def native_size(self) -> Size:  # noqa: D102
        side = self.pipeline.default_sample_size * self.pipeline.vae_scale_factor
        return Size(side, side)

    def encode_prompts(self, prompts: list[str]) -> Conditioning:  # noqa: D102
        for name in self.components[1:]:
            if getattr(self.pipeline, name) is not None:
                self.component(name)
        # A T5 of one token stands for none: that it cuts every prompt is no news.
        loggers = _CUTTING if self.max_sequence_length == 1 else ()
        with quiet(*loggers):
            embeds, _, pooled, _ = self.pipeline.encode_prompt(
                prompt=prompts,
                prompt_2=prompts,
                prompt_3=prompts,
                device=self.device,
                do_classifier_free_guidance=False,
                max_sequence_length=self.max_sequence_length,
            )
        return {"prompt_embeds": embeds, "pooled": pooled}

    def latent_shape(self, size: Size) -> tuple[int, ...]:  # noqa: D102
        scale, config = self.pipeline.vae_scale_factor, self.transformer.config
        multiple, limit = scale * config.patch_size, scale * config.patch_size * config.pos_embed_max_size
        if size.num_frames != 1:
            raise ValueError(f"num_frames is {size.num_frames}, but {type(self).__name__} makes images")
        for name in ("height", "width"):
            pixels = getattr(size, name)
            if pixels % multiple or not 0 < pixels <= limit:
                below = min(max(pixels // multiple * multiple, multiple), limit)
                nearest = sorted({below, min(below + multiple, limit)})
                raise ValueError(
                    f"{name} is {pixels}; it must be a multiple of {multiple} up to {limit}: "
                    f"try {' or '.join(map(str, nearest))}"
                )
        return (config.in_channels, size.height // scale, size.width // scale)

    def schedule(self, num_steps: int, size: Size, grid: Grid = "native") -> Schedule:  # noqa: D102
        from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import calculate_shift

        scheduler = copy.deepcopy(self.pipeline.scheduler)
        config, options = scheduler.config, dict[str, Any]()
        if config.get("use_dynamic_shifting"):
            _, height, width = self.latent_shape(size)
            tokens = (height // self.transformer.config.patch_size) * (width // self.transformer.config.patch_size)
            shifts = (config.base_image_seq_len, config.max_image_seq_len, config.base_shift, config.max_shift)
            options["mu"] = calculate_shift(tokens, *shifts)
        if grid == "linspace":
            options["sigmas"] = torch.linspace(1, 1 / num_steps, num_steps, dtype=torch.float64).tolist()
        scheduler.set_timesteps(num_steps, device="cpu", **options)
        return Schedule(scheduler.sigmas.float(), scheduler.timesteps.float())

    def predict(self, latents: Tensor, timestep: Tensor, cond: Conditioning, size: Size) -> Tensor:  # noqa: D102
        return self.roles.active(
            hidden_states=latents.to(self.dtype),
            timestep=timestep,
            encoder_hidden_states=cond["prompt_embeds"].to(self.dtype),
            pooled_projections=cond["pooled"].to(self.dtype),
            return_dict=False,
        )[0]

    def decode(self, latents: Tensor, size: Size) -> Tensor:  # noqa: D102
        vae = self.component("vae")
        scaled = latents.to(vae.dtype) / vae.config.scaling_factor + vae.config.shift_factor
        return self.pipeline.image_processor.postprocess(
            vae.decode(scaled, return_dict=False)[0], output_type="pt"
        ).float()
