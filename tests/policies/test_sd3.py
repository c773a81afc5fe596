"""The SD3 policy against the stock pipeline."""

import diffusers
import pytest
import torch

from lit_diffrl.policies import LoRA, SD3Policy, Size
from lit_diffrl.sampling import sample
from lit_diffrl.sampling.noise import randn
from tests import tiny

PROMPTS = ["a red fox", "two blue birds on a tree"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory, sd35_folder):
    return {
        "sd3": tiny.save(tiny.sd3_pipeline(v35=False), tmp_path_factory.mktemp("sd3")),
        "sd35": sd35_folder,
        "shapes": "embedded:shapes",
    }


def stock(policy: SD3Policy, noise: torch.Tensor, steps: int, guidance: float, size: Size, output: str) -> torch.Tensor:
    pipe = diffusers.StableDiffusion3Pipeline.from_pretrained(policy.pretrained, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    options = dict(num_inference_steps=steps, guidance_scale=guidance, height=size.height, width=size.width)
    length = policy.max_sequence_length
    return pipe(PROMPTS, latents=noise.clone(), output_type=output, max_sequence_length=length, **options).images


def ours(policy: SD3Policy, noise: torch.Tensor, steps: int, guidance: float, size: Size) -> torch.Tensor:
    cond = policy.encode_prompts(PROMPTS)
    uncond = policy.encode_prompts([""] * len(PROMPTS))
    return sample(
        lambda x, t: policy.velocity(x, t, cond, uncond, guidance, size=size), noise, policy.schedule(steps, size)
    )


@pytest.mark.parametrize("guidance", [1.0, 4.5])
@pytest.mark.parametrize("model", ["sd3", "sd35", "shapes"])
def test_euler_sampling_equals_the_stock_pipeline_to_the_last_bit(folders, model, guidance):
    policy = SD3Policy(folders[model])
    policy.load()
    size = policy.native_size()
    noise = randn(policy.latent_shape(size), [11, 12])
    with torch.no_grad():
        latents = ours(policy, noise, 6, guidance, size)
        assert (latents - stock(policy, noise, 6, guidance, size, "latent")).abs().max() == 0
        assert (policy.decode(latents, size) - stock(policy, noise, 6, guidance, size, "pt")).abs().max() == 0


def test_a_size_other_than_the_native_one_equals_the_stock_pipeline(folders):
    policy, size = SD3Policy(folders["sd35"]), Size(32, 24)
    policy.load()
    noise = randn(policy.latent_shape(size), [1, 2])
    with torch.no_grad():
        latents = ours(policy, noise, 3, 1.0, size)
    assert (latents - stock(policy, noise, 3, 1.0, size, "latent")).abs().max() == 0


def test_rows_with_times_of_their_own_equal_each_row_alone(folders):
    policy = SD3Policy(folders["sd35"])
    policy.load()
    size = policy.native_size()
    x, t = randn(policy.latent_shape(size), [1, 2]), torch.tensor([900.25, 13.5])
    with torch.no_grad():
        cond = policy.encode_prompts(PROMPTS)
        both = policy.velocity(x, t, cond, size=size)
        for i in range(2):
            alone = policy.velocity(x[i : i + 1], t[i : i + 1], {k: c[i : i + 1] for k, c in cond.items()}, size=size)
            assert (both[i] - alone[0]).abs().max() < 5e-6
        assert (policy.velocity(x, t.round(), cond, size=size) - both).abs().max() > 1e-5  # times arrive unrounded


def test_sizes_that_cannot_be_made_are_refused_with_the_nearest_ones(folders):
    policy = SD3Policy(folders["sd35"])
    policy.load()
    with pytest.raises(ValueError, match=r"height is 30; .* multiple of 4 up to 96: try 28 or 32"):
        policy.latent_shape(Size(30, 32))
    with pytest.raises(ValueError, match="num_frames is 5"):
        policy.latent_shape(Size(32, 32, 5))


def test_guidance_without_a_negative_prompt_is_refused(folders):
    policy = SD3Policy(folders["sd35"])
    policy.load()
    size = policy.native_size()
    x = randn(policy.latent_shape(size), [1, 2])
    with pytest.raises(ValueError, match=r"guidance_scale is 4\.5"):
        policy.velocity(x, torch.full((2,), 500.0), policy.encode_prompts(PROMPTS), guidance_scale=4.5, size=size)


@pytest.mark.parametrize(
    ("pretrained", "error", "message"),
    [
        ("embedded:shape", ValueError, "embedded models are"),
        ("./nowhere", FileNotFoundError, "neither a directory nor a hub id"),
        ("/nowhere/at/all", FileNotFoundError, "neither a directory nor a hub id"),
    ],
)
def test_a_model_that_is_not_there_is_refused_before_loading(pretrained, error, message):
    with pytest.raises(error, match=message):
        SD3Policy(pretrained)


def test_a_directory_without_a_pipeline_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"model_index\.json"):
        SD3Policy(str(tmp_path))


def test_half_precision_weights_are_not_trained_as_a_whole(folders):
    with pytest.raises(ValueError, match="without LoRA"):
        SD3Policy(folders["sd35"], dtype="bfloat16")


def test_adapters_are_float32_on_a_half_precision_base(folders):
    policy = SD3Policy(folders["sd35"], lora=LoRA(rank=2, alpha=4), dtype="bfloat16")
    policy.load()
    trained = [p for p in policy.parameters() if p.requires_grad]
    assert trained and {p.dtype for p in trained} == {torch.float32}
    assert policy.transformer.pos_embed.proj.weight.dtype == torch.bfloat16
