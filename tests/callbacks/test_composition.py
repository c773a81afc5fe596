"""The shapes world's grammar, detector and scores, against pictures whose content is known."""

import importlib.util
import random
from itertools import permutations
from pathlib import Path
from types import ModuleType

import pytest
import torch

from lit_diffrl.callbacks.rewards.composition import (
    KINDS,
    Composition,
    Detection,
    caption,
    compositions,
    detect,
    parse,
    score,
)


def _load_world() -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / "make_embedded" / "world.py"
    spec = importlib.util.spec_from_file_location("make_embedded_world", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


world = _load_world()
WANTED = world.sample_compositions(600, dict.fromkeys(KINDS, 1.0), world.by_kind("train"), random.Random(0))
PICTURES = world.render(WANTED, torch.Generator().manual_seed(0))


def show(prompt: str, seed: int = 0) -> torch.Tensor:
    """A picture (1, 3, 32, 32) that shows what the prompt says."""
    return world.render([parse(prompt)], torch.Generator().manual_seed(seed))


def one(picture: torch.Tensor, prompt: str) -> dict[str, float]:
    return {name: values.item() for name, values in score(picture, [parse(prompt)]).items()}


def test_true_pictures_are_right() -> None:
    scores = score(PICTURES, WANTED)
    assert scores["strict"].mean() >= 0.98
    assert scores["soft"].mean() >= 0.99
    relation = torch.tensor([w.relation is not None for w in WANTED])
    assert torch.equal(scores["position"].isnan(), ~relation)
    assert all(values.shape == (600,) and values.dtype == torch.float32 for values in scores.values())


def test_detections_are_what_was_drawn() -> None:
    for found, wanted in zip(detect(PICTURES[:100]), WANTED, strict=False):
        assert isinstance(found, Detection)
        assert sorted((c, s) for c, s, _, _ in found.objects) == sorted(wanted.objects)
        assert found.background == wanted.background
        for _, _, x, y in found.objects:  # one object in the middle of each cell; a triangle's centroid lies 1 px lower
            assert abs(x % 8 - 4) < 0.3 and abs(y % 8 - 4.5) < 0.9


@pytest.mark.parametrize(
    ("wanted", "shown", "soft"),
    [
        ("three red squares on black", "three blue squares on black", 0.25),
        ("three red squares on black", "three red diamonds on black", 0.25),
        ("three red squares on black", "three blue diamonds on black", 0.0),
        ("three red squares on black", "two red squares on black", 2 / 3),
        ("three red squares on black", "four red squares on black", 3 / 4),
        ("three red squares on black", "three red squares on white", 0.5),
        ("one cyan triangle on white", "two cyan triangles on white", 0.5),
        ("one cyan triangle on white", "a cyan triangle and a red square on white", 0.5),
        ("a red square and two blue diamonds on white", "a red square and two green diamonds on white", 1.5 / 3),
        ("a red square and two blue diamonds on white", "a red triangle and two blue diamonds on white", 2.25 / 3),
        ("a red square and two blue diamonds on white", "two red squares and two blue diamonds on white", 3 / 4),
        ("a red square and two blue diamonds on white", "a red square and a blue diamond on white", 2 / 3),
        ("a red square and two blue diamonds on white", "two red squares and a blue diamond on white", 2 / 3),
        ("a red square and a blue diamond on black", "a red diamond and a blue square on black", 0.25),
        ("a red square left of a blue triangle on black", "a red square right of a blue triangle on black", 0.5),
        ("a red square left of a blue triangle on black", "a red square above a blue triangle on black", 0.5),
        ("a red square left of a blue triangle on black", "a red square left of a green triangle on black", 1.25 / 2),
        ("a red square left of a blue triangle on black", "a red diamond left of a blue triangle on black", 1.25 / 2),
        ("a red square left of a blue triangle on black", "a red square left of a blue triangle on white", 0.5),
        ("a red square left of a blue triangle on black", "a blue triangle left of a red square on white", 0.25),
        ("a red square left of a blue triangle on black", "one red square on black", 0.25),
    ],
)
def test_each_defect_has_its_price(wanted: str, shown: str, soft: float) -> None:
    for seed in range(4):
        scores = one(show(shown, seed), wanted)
        assert scores["strict"] == 0
        assert scores["soft"] == pytest.approx(soft, abs=1e-6)


def test_equivalent_relations_are_equally_right() -> None:
    assert one(show("a red square left of a blue triangle on black"), "a blue triangle right of a red square on black")[
        "strict"
    ]


def test_diagnostics_name_the_defect() -> None:
    wanted = "a red square and two blue diamonds on white"
    swapped = one(show("a blue square and two red diamonds on white"), wanted)
    assert (swapped["count"], swapped["background"], swapped["shape"]) == (1, 1, 1)
    assert swapped["color"] == pytest.approx(2 / 3)
    extra = one(show("two red squares and two blue diamonds on black"), wanted)
    assert (extra["count"], extra["background"]) == (0, 0)
    assert (extra["color"], extra["shape"]) == (0.75, 0.75)
    wrong_way = one(show("a red square above a blue square on black"), "a red square below a blue square on black")
    assert (wrong_way["position"], wrong_way["color"], wrong_way["shape"], wrong_way["count"]) == (0, 1, 1, 1)


def test_pictures_without_objects_score_nothing() -> None:
    wanted = [parse("two red squares on black"), parse("a red square above a blue triangle on black")]
    noise = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    for pictures in (
        torch.zeros(2, 3, 32, 32),
        torch.full((2, 3, 32, 32), 0.5),
        noise,
        torch.full_like(noise, torch.nan),
    ):
        scores = score(pictures, wanted)
        assert scores["strict"].sum() == 0
        assert scores["soft"].max() <= 0.1
        assert scores["position"][1] == 0
    assert score(torch.zeros(1, 3, 32, 32), wanted[:1])["background"] == 1
    assert score(torch.full((1, 3, 32, 32), 0.5), wanted[:1])["background"] == 0


def test_a_blob_of_the_right_colour_is_no_shape() -> None:
    picture = torch.full((1, 3, 32, 32), 10 / 255)
    picture[0, :, 4:16, 4:10] = torch.tensor([220, 40, 40]).div(255)[:, None, None]
    assert detect(picture)[0].objects[0][:2] == ("red", None)
    assert one(picture, "one red square on black")["soft"] == 0.25


def test_soft_is_the_best_assignment() -> None:
    """Against a search over all assignments, for crowded pictures of many half-right objects."""
    pictures = world.render_dense(400, torch.Generator().manual_seed(1))
    checked = 0
    for index, found in enumerate(detect(pictures)):
        wanted = WANTED[index]
        if wanted.relation is not None or not 1 <= len(found.objects) <= 6:
            continue
        seen = [thing[:2] for thing in found.objects] + [(None, None)] * len(wanted.objects)
        best = 0.0
        for chosen in set(permutations(seen, len(wanted.objects))):
            pairs = zip(wanted.objects, chosen, strict=True)
            best = max(best, sum({2: 1.0, 1: 0.25, 0: 0.0}[(a[0] == b[0]) + (a[1] == b[1])] for a, b in pairs))
        expected = best / max(len(wanted.objects), len(found.objects))
        expected *= 1.0 if found.background == wanted.background else 0.5
        assert score(pictures[index : index + 1], [wanted])["soft"].item() == pytest.approx(expected, abs=1e-6)
        checked += 1
    assert checked > 50


def test_order_and_size_of_the_batch_do_not_matter() -> None:
    pictures = torch.cat(
        [PICTURES[:20], world.render_dense(20, torch.Generator().manual_seed(2)), torch.rand(8, 3, 32, 32)]
    )
    wanted = WANTED[:48]
    scores = score(pictures, wanted)
    order = torch.randperm(48, generator=torch.Generator().manual_seed(3))
    shuffled = score(pictures[order], [wanted[i] for i in order])
    for name, values in scores.items():
        assert torch.equal(values[order].nan_to_num(-1), shuffled[name].nan_to_num(-1))
        alone = torch.cat([score(pictures[i : i + 1], wanted[i : i + 1])[name] for i in range(0, 48, 5)])
        assert torch.equal(values[::5].nan_to_num(-1), alone.nan_to_num(-1))


def test_scores_do_not_depend_on_the_default_dtype() -> None:
    """In wide pictures too, whose coordinates half precision cannot tell apart."""
    wide = torch.full((len(PICTURES), 3, 32, 320), 10 / 255)
    wide[..., 288:] = PICTURES
    on_black = [w.background == "black" for w in WANTED]
    pictures, wanted = wide[on_black], [w for w in WANTED if w.background == "black"]
    expected, seen = score(pictures, wanted), detect(pictures)
    torch.set_default_dtype(torch.bfloat16)
    try:
        scores, detections = score(pictures, wanted), detect(pictures)
    finally:
        torch.set_default_dtype(torch.float32)
    assert expected["strict"].mean() >= 0.98 and detections == seen
    for name, values in expected.items():
        assert scores[name].dtype == torch.float32
        assert torch.equal(scores[name].nan_to_num(-1), values.nan_to_num(-1))


def test_size_of_the_batch_must_match() -> None:
    assert score(torch.zeros(0, 3, 32, 32), [])["strict"].shape == (0,)
    with pytest.raises(ValueError, match="2 pictures"):
        score(torch.zeros(2, 3, 32, 32), [parse("one red square on black")])
    with pytest.raises(ValueError, match="shape"):
        detect(torch.zeros(3, 32, 32))


def test_every_prompt_reads_back() -> None:
    everything = list(compositions())
    captions = [caption(composition) for composition in everything]
    assert len(set(captions)) == len(everything) == 5544
    assert [parse(text) for text in captions] == everything
    assert {kind: sum(c.kind == kind for c in everything) for kind in KINDS} == {
        "single": 36,
        "count": 108,
        "pair": 3240,
        "relation": 2160,
    }


def test_reading_is_lenient_about_form_only() -> None:
    assert parse("  One RED square on  black. ") == Composition((("red", "square"),), "black")


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        "a cat",
        "five red squares on black",
        "two red square on black",
        "one red squares on black",
        "one red circle on black",
        "one orange square on black",
        "one red square on grey",
        "a red square and a red diamond on black",
        "three red squares and two blue diamonds on black",
        "two red squares left of a blue triangle on black",
        "a red square left of a red triangle on black",
        "a red square near a blue triangle on black",
    ],
)
def test_other_prompts_are_refused(prompt: str) -> None:
    with pytest.raises(ValueError, match="a red square left of a blue triangle on black") as caught:
        parse(prompt)
    assert repr(prompt) in str(caught.value)


def test_impossible_compositions_are_refused() -> None:
    for objects, relation in (((), None), ((("red", "square"),) * 5, None), ((("red", "square"),), "above")):
        with pytest.raises(ValueError):
            Composition(objects, "black", relation)
    with pytest.raises(ValueError, match="orange"):
        Composition((("orange", "square"),), "black")
