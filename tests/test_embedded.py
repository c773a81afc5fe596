"""The picture model that ships with the package: a genuine, small pipeline of known, improvable quality."""

import importlib.util
import json
import random
import sys
from pathlib import Path
from types import ModuleType

import diffusers
import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from safetensors.torch import load_file

from lit_diffrl.callbacks.rewards.composition import KINDS, Composition, caption, detect, parse, score

ROOT = Path(__file__).parents[1]
SHAPES = ROOT / "lit_diffrl" / "policies" / "embedded" / "shapes"


def load_module(name: str) -> ModuleType:
    """A module of examples/make_embedded, which is a program and not a package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / "make_embedded" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> object:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def pipe() -> StableDiffusion3Pipeline:
    diffusers.logging.set_verbosity_error()
    pipe = StableDiffusion3Pipeline.from_pretrained(SHAPES, torch_dtype=torch.float32, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def prompts(part: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (SHAPES / "prompts" / f"{part}.jsonl").read_text().splitlines()]


def draw(pipe: StableDiffusion3Pipeline, texts: list[str], seed: int = 0, **options: float) -> torch.Tensor:
    noise = torch.randn(len(texts), 4, 8, 8, generator=torch.Generator().manual_seed(seed))
    settings = {"num_inference_steps": 10, "guidance_scale": 1.0, "max_sequence_length": 1, **options}
    with torch.no_grad():
        return pipe(prompt=texts, latents=noise, output_type="pt", **settings).images


def test_directory_is_small_and_in_half_precision() -> None:
    files = [path for path in SHAPES.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 4 * 1024**2
    weights = [path for path in files if path.suffix == ".safetensors"]
    assert {path.parent.name for path in weights} >= {"transformer", "vae", "text_encoder", "text_encoder_2"}
    for path in weights:
        assert {tensor.dtype for tensor in load_file(path).values() if tensor.is_floating_point()} == {torch.float16}
    assert json.loads((SHAPES / "model_index.json").read_text())["_class_name"] == "StableDiffusion3Pipeline"


@pytest.mark.parametrize(("guidance", "tokens"), [(1.0, 1), (2.0, 1), (1.0, 256)])
def test_stock_pipeline_samples(pipe: StableDiffusion3Pipeline, guidance: float, tokens: int) -> None:
    texts = ["one red square on black", "a blue diamond above a cyan square on white"]
    images = draw(pipe, texts, guidance_scale=guidance, max_sequence_length=tokens, num_inference_steps=4)
    assert images.shape == (2, 3, 32, 32)
    assert images.isfinite().all() and images.min() >= 0 and images.max() <= 1
    assert torch.equal(score(images, [parse(text) for text in texts])["background"], torch.ones(2))


def test_every_step_is_a_useful_one(pipe: StableDiffusion3Pipeline) -> None:
    scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config)
    for steps in (2, 4, 6, 10, 20):
        scheduler.set_timesteps(steps)
        assert scheduler.sigmas[[0, -2, -1]].tolist() == pytest.approx([1.0, 0.1, 0.0])
        assert torch.allclose(scheduler.timesteps, scheduler.sigmas[:-1] * 1000)


def test_codec_keeps_what_counts(pipe: StableDiffusion3Pipeline) -> None:
    wanted = [parse(row["prompt"]) for row in prompts("val")[:100]]
    pictures = load_module("world").render(wanted, torch.Generator().manual_seed(0))
    with torch.no_grad():
        latents = pipe.vae.encode(pictures * 2 - 1).latents
        decoded = pipe.vae.decode(latents).sample / 2 + 0.5
        rough = pipe.vae.decode(latents + 0.1 * latents.std() * torch.randn(latents.shape)).sample / 2 + 0.5
    assert score(decoded, wanted)["strict"].mean() >= 0.95
    assert score(rough, wanted)["strict"].mean() >= 0.9
    scaled = (latents - pipe.vae.config.shift_factor) * pipe.vae.config.scaling_factor
    assert abs(scaled.mean()) < 0.2 and 0.6 < scaled.std() < 1.1


def test_prompt_files_are_disjoint_and_readable() -> None:
    world = load_module("world")
    seen: dict[str, str] = {}
    for part in ("train", "val", "test"):
        rows = prompts(part)
        assert len(rows) == (2000 if part == "train" else 256)
        for row in rows:
            composition = parse(row["prompt"])
            assert row["source"] == composition.kind
            assert world.split(composition) == part
            assert seen.setdefault(world.meaning(composition), part) == part
        assert len({row["prompt"] for row in rows}) == len(rows)
        assert {row["source"] for row in rows} == set(KINDS)


def test_files_are_what_the_program_writes(tmp_path: Path) -> None:
    load_module("world")
    load_module("prompts").write(tmp_path)
    for part in ("train", "val", "test", "tasks_train", "tasks_val"):
        assert (tmp_path / f"{part}.jsonl").read_text() == (SHAPES / "prompts" / f"{part}.jsonl").read_text()


def test_twins_share_a_split() -> None:
    world = load_module("world")
    twins = [
        ("a red square left of a blue triangle on black", "a blue triangle right of a red square on black"),
        ("a red square below a blue triangle on black", "a blue triangle above a red square on black"),
        ("a red square and two cyan diamonds on white", "two cyan diamonds and a red square on white"),
    ]
    for first, second in twins:
        assert world.meaning(parse(first)) == world.meaning(parse(second))
        assert parse(first) != parse(second)
    assert world.meaning(parse("two red squares on black")) != world.meaning(parse("one red square on black"))


def test_placed_pictures_are_where_their_captions_say() -> None:
    world = load_module("world")
    square = parse("one red square on black")
    assert world.placed_caption(square, "left of") == "a red square left on black"
    for index, side in enumerate(("left of", "right of", "above", "below")):
        pictures = world.render([square] * 50, torch.Generator().manual_seed(0), [side] * 50)
        places = [found.objects[0][2:] for found in detect(pictures)]
        inside = [(x < 16, x > 16, y < 16, y > 16)[index] for x, y in places]
        assert all(inside) and len({(x // 8, y // 8) for x, y in places}) > 4


def test_wrong_captions_are_wrong_in_one_way() -> None:
    world, rng = load_module("world"), random.Random(0)
    for composition in [c for table in world.by_kind("train").values() for c in table[::40]]:
        wrong: Composition = world.corrupt(composition, rng)
        assert wrong != composition and world.split(wrong) == "train"
        assert wrong.background == composition.background
        assert (wrong.relation is None) == (composition.relation is None)


def test_pinned_quality(pipe: StableDiffusion3Pipeline) -> None:
    """Good enough to learn from, with room to improve: reinforcement learning starts from these figures."""
    wanted = [parse(row["prompt"]) for row in prompts("val")]
    scores = score(draw(pipe, [row["prompt"] for row in prompts("val")]), wanted)
    assert 0.35 <= scores["strict"].mean() <= 0.65
    assert scores["soft"].mean() <= 0.85
    for name in ("count", "color", "shape", "position"):
        assert 0.4 < scores[name].nanmean() < 0.97, name
    single = [composition for composition in wanted if composition.kind == "single"] * 8
    assert score(draw(pipe, [caption(composition) for composition in single], seed=1), single)["strict"].mean() > 0.85
