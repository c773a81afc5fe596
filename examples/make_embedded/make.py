"""Makes the embedded picture model: ``python examples/make_embedded/make.py --out DIR``.

Trains the codec, then the transformer with its text encoders, saves them as a Stable Diffusion 3 pipeline together with
the prompt files, and prints how good the pictures are. Everything is seeded and counted in steps.
"""

import argparse
import dataclasses
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are far too small for more

import diffusers
import torch
from diffusers import AutoencoderTiny
from pipeline import assemble, load
from pipeline import save as save_pipeline
from prompts import held_out, write
from quality import HEADER, line, quality
from transformer import T5_TOKENS, Base, Recipe, train_base
from vae import ceiling, train_vae

VAE_STEPS = 4500


def main() -> None:
    """Makes everything, or, with ``--vae``, everything but the codec."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="where the pipeline goes")
    parser.add_argument("--vae", type=Path, help="a codec that was trained before")
    parser.add_argument("--steps", type=int, default=Recipe.steps, help="steps of pre-training the transformer")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    diffusers.logging.set_verbosity_error()  # the pipeline remarks on the class of its VAE and on cut prompts

    if args.vae is not None:
        vae = AutoencoderTiny.from_pretrained(args.vae)
    else:
        vae = train_vae(VAE_STEPS, args.seed)
        vae.save_pretrained(args.out / "vae")
    print("codec, true pictures encoded and decoded:", ceiling(vae, args.seed + 2, 1000), flush=True)
    wanted = held_out("val")

    def save(base: Base) -> None:
        save_pipeline(assemble(vae, base.transformer, base.encoders, base.tokenizer), args.out)

    def report(step: int, loss: float, base: Base) -> None:
        save(base)
        print(f"step {step} | loss {loss:.4f} | {line(quality(load(args.out), wanted))}", flush=True)

    print(f"step | loss | {HEADER}", flush=True)
    recipe = dataclasses.replace(Recipe(), steps=args.steps, seed=args.seed)
    save(train_base(vae, recipe, report))
    write(args.out / "prompts")
    print_quality(args.out)


def print_quality(directory: Path) -> None:
    """Prints the final tables for the prompts of val.jsonl and test.jsonl."""
    pipe = load(directory)
    for part in ("val", "test"):
        wanted = held_out(part)
        print(f"\n{part}: steps | guidance | tokens | {HEADER}")
        for steps, guidance, tokens in (
            *((steps, 1.0, 1) for steps in (4, 6, 10, 20)),
            *((10, guidance, 1) for guidance in (1.5, 2.0)),
            (10, 1.0, T5_TOKENS),
        ):
            row = line(quality(pipe, wanted, steps=steps, guidance=guidance, tokens=tokens))
            print(f"{steps} | {guidance} | {tokens} | {row}", flush=True)


if __name__ == "__main__":
    main()
