"""Assembles the parts into a genuine ``StableDiffusion3Pipeline``, small enough to ship with a package."""

import copy
import json
from pathlib import Path

import torch
from diffusers import AutoencoderTiny, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from diffusers.models.attention_processor import JointAttnProcessor2_0
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor, nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

from lit_diffrl.callbacks.rewards.composition import RELATIONS
from lit_diffrl.callbacks.rewards.shape_detector import BACKGROUNDS, COLOURS, SHAPES

MAX_TOKENS = 12  # the longest prompt has ten words, plus start and end
LATENT_SHAPE = (4, 8, 8)
_TEXT_WIDTH = 40
_HEADS, _HEAD_WIDTH, _LAYERS = 2, 40, 4
_EXTRA_WORDS = ("a", "an", "the", "of", "on", "and", "with", "in", "picture", "one", "two", "three", "four")


def make_tokenizer() -> CLIPTokenizer:
    """A CLIP tokenizer with one token for each word of the grammar; other words fall back to bytes."""
    alphabet = sorted(ByteLevel.alphabet())
    pieces = alphabet + [letter + "</w>" for letter in alphabet] + ["<|startoftext|>", "<|endoftext|>"]
    words = [*_EXTRA_WORDS, *COLOURS, *BACKGROUNDS, *(w for r in RELATIONS for w in r.split())]
    words += [word for shape in SHAPES for word in (shape, shape + "s")]
    blank = CLIPTokenizer(vocab={p: i for i, p in enumerate(pieces)}, merges=[], model_max_length=MAX_TOKENS)
    return blank.train_new_from_iterator([w for w in words for _ in range(50)], vocab_size=900, show_progress=False)


def make_text_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModelWithProjection:
    """An untrained CLIP text model. The pipeline reads its last hidden state but one, which here follows two layers."""
    return CLIPTextModelWithProjection(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=_TEXT_WIDTH,
            intermediate_size=2 * _TEXT_WIDTH,
            projection_dim=_TEXT_WIDTH,
            num_hidden_layers=3,
            num_attention_heads=2,
            max_position_embeddings=MAX_TOKENS,
            hidden_act="gelu",
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def make_transformer() -> SD3Transformer2DModel:
    """An untrained transformer with 0.9 million parameters; 16 picture tokens, one for each cell of the grid."""
    return SD3Transformer2DModel(
        sample_size=LATENT_SHAPE[-1],
        patch_size=2,
        in_channels=LATENT_SHAPE[0],
        out_channels=LATENT_SHAPE[0],
        num_layers=_LAYERS,
        num_attention_heads=_HEADS,
        attention_head_dim=_HEAD_WIDTH,
        caption_projection_dim=_HEADS * _HEAD_WIDTH,
        joint_attention_dim=2 * _TEXT_WIDTH,
        pooled_projection_dim=2 * _TEXT_WIDTH,
        pos_embed_max_size=LATENT_SHAPE[-1] // 2,
        qk_norm="rms_norm",
    )


def make_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """Noise levels from 1 to 0.1, equally spaced, then 0.

    The default would end in a null step from 0.001 to 0; ``shift_terminal`` makes every one of N steps a useful one.
    """
    return FlowMatchEulerDiscreteScheduler(shift=1.0, shift_terminal=0.1)


def make_silent_t5() -> tuple[T5EncoderModel, T5Tokenizer]:
    """The third text encoder that the pipeline class insists on; its output is exactly zero, as if there were none."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -2.0)]
    tokenizer = T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=1)
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=2 * _TEXT_WIDTH,
        d_kv=8,
        d_ff=16,
        num_layers=1,
        num_heads=2,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
    )
    encoder = T5EncoderModel(config).eval()
    nn.init.zeros_(encoder.encoder.final_layer_norm.weight)
    return encoder, tokenizer


def token_ids(tokenizer: CLIPTokenizer, prompts: list[str]) -> Tensor:
    """Token numbers (B, 12), padded."""
    padded = tokenizer(prompts, padding="max_length", max_length=MAX_TOKENS, truncation=True, return_tensors="pt")
    return padded.input_ids


def encode(encoders: nn.ModuleList, ids: Tensor) -> tuple[Tensor, Tensor]:
    """What the pipeline computes from token numbers (B, 12), with one silent T5 token: (B, 13, D) and pooled (B, D)."""
    outputs = [encoder(ids, output_hidden_states=True) for encoder in encoders]
    context = torch.cat([output.hidden_states[-2] for output in outputs], dim=-1)
    return nn.functional.pad(context, (0, 0, 0, 1)), torch.cat([output[0] for output in outputs], dim=-1)


def save(pipeline: StableDiffusion3Pipeline, directory: Path) -> None:
    """Save a pipeline, with configs that a plain ``from_pretrained`` reads without a remark, into float32."""
    pipeline.save_pretrained(directory)
    for file in directory.glob("*/config.json"):
        config = json.loads(file.read_text())
        config.pop("_name_or_path", None)
        if config.get("_class_name") == "AutoencoderTiny":
            config.pop("block_out_channels")  # written by the class, which then complains about it
        if "dtype" in config:
            config["dtype"] = "float32"  # a text encoder in half precision beside a transformer in full does not run
        file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def assemble(
    vae: AutoencoderTiny, transformer: SD3Transformer2DModel, encoders: nn.ModuleList, tokenizer: CLIPTokenizer
) -> StableDiffusion3Pipeline:
    """A pipeline of copies, in half precision as it will be saved."""
    silent, silent_tokenizer = make_silent_t5()
    first, second = (copy.deepcopy(encoder).half().eval() for encoder in encoders)
    transformer = copy.deepcopy(transformer).half().eval()
    transformer.set_attn_processor(JointAttnProcessor2_0())  # training uses one of its own
    return StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=make_scheduler(),
        vae=copy.deepcopy(vae).half().eval(),
        text_encoder=first,
        tokenizer=tokenizer,
        text_encoder_2=second,
        tokenizer_2=tokenizer,
        text_encoder_3=silent.half(),
        tokenizer_3=silent_tokenizer,
    )


def load(directory: Path) -> StableDiffusion3Pipeline:
    """Reads a saved pipeline with the stock class, in single precision, without progress bars."""
    pipe = StableDiffusion3Pipeline.from_pretrained(directory, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe
