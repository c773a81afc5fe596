"""Tiny random pipelines, built in code: no hub, a fraction of a second."""

from pathlib import Path

import torch


def clip_tokenizer(length: int = 77):
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import CLIPTokenizer

    alphabet = sorted(ByteLevel.alphabet())
    tokens = [*alphabet, *(c + "</w>" for c in alphabet), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={t: i for i, t in enumerate(tokens)}, merges=[], model_max_length=length)


def t5_tokenizer(length: int = 512):
    import string

    from transformers import T5Tokenizer

    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -2.0)]
    return T5Tokenizer(vocab=pieces + [(c, -8.0) for c in string.ascii_letters], extra_ids=0, model_max_length=length)


def sd3_pipeline(seed: int = 0, v35: bool = True):
    """A ``StableDiffusion3Pipeline`` of about 150 k random weights; like SD3.5-medium with ``v35``, else like SD3."""
    import diffusers
    import transformers

    torch.manual_seed(seed)
    clip_tok, t5_tok = clip_tokenizer(), t5_tokenizer()
    clip_config = transformers.CLIPTextConfig(
        vocab_size=len(clip_tok),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=77,
        projection_dim=16,
        bos_token_id=clip_tok.bos_token_id,
        eos_token_id=clip_tok.eos_token_id,
        pad_token_id=clip_tok.pad_token_id,
    )
    t5_config = transformers.T5Config(
        vocab_size=len(t5_tok), d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0
    )
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=32,
        pos_embed_max_size=24,
        **({"qk_norm": "rms_norm", "dual_attention_layers": (0,)} if v35 else {}),
    )
    # The output layer starts at zero in spirit only; random biases keep every path alive.
    for p in transformer.parameters():
        p.data += 0.02 * torch.randn_like(p)
    vae = diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 8),
        norm_num_groups=4,
        latent_channels=4,
        scaling_factor=1.5,
        shift_factor=0.06,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    return diffusers.StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae,
        text_encoder=transformers.CLIPTextModelWithProjection(clip_config).eval(),
        tokenizer=clip_tok,
        text_encoder_2=transformers.CLIPTextModelWithProjection(clip_config).eval(),
        tokenizer_2=clip_tok,
        text_encoder_3=transformers.T5EncoderModel(t5_config).eval(),
        tokenizer_3=t5_tok,
    )


def save(pipeline, folder: Path) -> str:
    pipeline.save_pretrained(folder)
    return str(folder)
