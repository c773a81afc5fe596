"""Exported weights, loaded again by stock diffusers."""

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file

from lit_diffrl.policies import LoRA, SD3Policy
from lit_diffrl.policies.export import load_lora
from lit_diffrl.sampling.noise import randn


def trained(folder, lora):
    torch.manual_seed(0)
    policy = SD3Policy(folder, lora=lora)
    policy.load()
    for p in policy.parameters():
        if p.requires_grad:
            p.data += 0.1 * torch.randn_like(p)
    return policy


def velocity(policy, transformer):
    x = randn(policy.latent_shape(policy.native_size()), [3])
    cond = policy.encode_prompts(["a red fox"])
    with torch.no_grad():
        return transformer(
            hidden_states=x,
            timestep=torch.full((1,), 400.0),
            encoder_hidden_states=cond["prompt_embeds"],
            pooled_projections=cond["pooled"],
        ).sample


def fresh(folder):
    return diffusers.StableDiffusion3Pipeline.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize("alpha", [4.0, 16.0])
def test_an_exported_adapter_loads_in_stock_diffusers_at_full_strength(sd35_folder, tmp_path, alpha):
    policy = trained(sd35_folder, LoRA(rank=4, alpha=alpha))
    policy.roles.add("old")
    file = policy.export(tmp_path)
    pipe = fresh(sd35_folder)
    base = velocity(policy, pipe.transformer)
    load_lora(pipe, tmp_path)
    assert (velocity(policy, pipe.transformer) - velocity(policy, policy.transformer)).abs().max() <= 1e-6
    assert (velocity(policy, pipe.transformer) - base).abs().max() > 1e-3
    assert all(".lora" in key for key in load_file(file))


def test_an_exported_transformer_loads_in_stock_diffusers(sd35_folder, tmp_path):
    policy = trained(sd35_folder, None)
    policy.roles.add("old")
    policy.export(tmp_path)
    again = diffusers.SD3Transformer2DModel.from_pretrained(tmp_path, subfolder="transformer")
    assert (velocity(policy, again) - velocity(policy, policy.transformer)).abs().max() == 0


def test_an_adapter_of_which_no_key_fits_is_refused(sd35_folder, tmp_path):
    file = trained(sd35_folder, LoRA(rank=4, alpha=8)).export(tmp_path)
    save_file({f"base_model.model.{k}": v for k, v in load_file(file).items()}, file)
    with pytest.raises(ValueError, match="0 of its"):
        load_lora(fresh(sd35_folder), tmp_path)
