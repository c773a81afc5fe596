"""Prompts of the shapes world, and how well pictures fulfil them: pure, batched torch.

The grammar has four kinds of prompts, on a black or white background:

* single: ``one red square on black``
* count: ``three red squares on black``, two to four objects
* pair: ``a red square and two blue diamonds on white``, two colours, up to three each and four in all
* relation: ``a red square left of a blue triangle on black``, two colours; left of, right of, above or below

:func:`score` compares what :mod:`~lit_diffrl.callbacks.rewards.shape_detector` finds with what a prompt asks for.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations, product

import torch
from torch import Tensor

from lit_diffrl.callbacks.rewards.shape_detector import BACKGROUNDS, COLOURS, SHAPES, Measurements, measure

__all__ = ["KINDS", "RELATIONS", "Composition", "Detection", "caption", "compositions", "detect", "parse", "score"]

RELATIONS: tuple[str, ...] = ("left of", "right of", "above", "below")
KINDS: tuple[str, ...] = ("single", "count", "pair", "relation")
MAX_REQUIRED = 4
_NUMBERS = {"one": 1, "two": 2, "three": 3, "four": 4}
_WORDS = {number: word for word, number in _NUMBERS.items()}
_HALF_RIGHT = 0.25  # worth of an object with the right colour or the right shape, but not both
_PENALTY = 0.5  # factor for a relation that does not hold, and for a wrong background


@dataclass(frozen=True)
class Composition:
    """What a prompt asks for.

    Attributes:
        objects: (colour, shape) of each of the one to four objects; in a relation, subject first.
        background: a key of ``BACKGROUNDS``.
        relation: one of :data:`RELATIONS`, which then holds between the two objects.
    """

    objects: tuple[tuple[str, str], ...]
    background: str
    relation: str | None = None

    def __post_init__(self) -> None:
        known = all(colour in COLOURS and shape in SHAPES for colour, shape in self.objects)
        if not known or self.background not in BACKGROUNDS or self.relation not in (None, *RELATIONS):
            raise ValueError(f"unknown colour, shape, background or relation in {self!r}")
        colours = {colour for colour, _ in self.objects}
        if self.relation is not None:
            valid = len(self.objects) == len(colours) == 2
        else:
            valid = 1 <= len(self.objects) <= MAX_REQUIRED and len(set(self.objects)) == len(colours) <= 2
        if not valid:
            raise ValueError(f"not a composition of this world: {self!r}")

    @property
    def kind(self) -> str:
        """One of :data:`KINDS`."""
        if self.relation is not None:
            return "relation"
        if len(set(self.objects)) == 2:
            return "pair"
        return "single" if len(self.objects) == 1 else "count"


@dataclass(frozen=True)
class Detection:
    """What one picture shows.

    Attributes:
        objects: per object its colour and shape (None where unclear) and its centroid x, y in px from the top left.
        background: a key of ``BACKGROUNDS``, or None where there is no plain background.
    """

    objects: tuple[tuple[str | None, str | None, float, float], ...]
    background: str | None


def _plural(shape: str, number: int) -> str:
    return shape if number == 1 else shape + "s"


def caption(composition: Composition) -> str:
    """The prompt that asks for the composition; :func:`parse` is its inverse."""
    ground = f"on {composition.background}"
    if composition.relation is not None:
        (colour, shape), (other_colour, other_shape) = composition.objects
        return f"a {colour} {shape} {composition.relation} a {other_colour} {other_shape} {ground}"
    groups = [(kind, composition.objects.count(kind)) for kind in dict.fromkeys(composition.objects)]
    single = "one" if len(groups) == 1 else "a"
    phrases = [
        f"{single if number == 1 else _WORDS[number]} {colour} {_plural(shape, number)}"
        for (colour, shape), number in groups
    ]
    return f"{' and '.join(phrases)} {ground}"


_PHRASE = rf"(a|{'|'.join(_NUMBERS)}) ({'|'.join(COLOURS)}) ({'|'.join(SHAPES)})(s?)"
_PROMPT = re.compile(rf"{_PHRASE}(?: (and|{'|'.join(RELATIONS)}) {_PHRASE})? on ({'|'.join(BACKGROUNDS)})")


def parse(prompt: str) -> Composition:
    """Reads a prompt; case, extra spaces and a final full stop do not matter.

    Raises:
        ValueError: the prompt is not one of this world's; the message says what is understood.
    """
    match = _PROMPT.fullmatch(" ".join(prompt.lower().split()).removesuffix("."))
    if match is not None:
        *words, background = match.groups()
        numbers = [_NUMBERS.get(word, 1) for word in (words[0], words[5]) if word is not None]
        plural = [s == "s" for s in (words[3], words[8]) if s is not None]
        objects = ((words[1], words[2]),) * numbers[0]
        if words[4] is not None:
            objects += ((words[6], words[7]),) * numbers[1]
        relation = words[4] if words[4] in RELATIONS else None
        small = words[4] is None or (max(numbers) <= 3 and words[1] != words[6])
        if small and plural == [number > 1 for number in numbers]:
            try:
                return Composition(objects, background, relation)
            except ValueError:
                pass  # too many objects: the message below is the more helpful one
    raise ValueError(
        f"cannot read the prompt {prompt!r}. Understood are 'two red squares on black' (one to four objects), "
        "'a red square and two blue diamonds on white' (two colours, up to three each and four in all) and "
        f"'a red square left of a blue triangle on black', with the colours {', '.join(COLOURS)}, the shapes "
        f"{', '.join(SHAPES)}, the relations {', '.join(RELATIONS)} and the backgrounds {', '.join(BACKGROUNDS)}."
    )


def compositions() -> Iterator[Composition]:
    """Every composition of the grammar, in a fixed order."""
    things = list(product(COLOURS, SHAPES))
    for thing, background, number in product(things, BACKGROUNDS, _WORDS):
        yield Composition((thing,) * number, background)
    for (first, second), background in product(permutations(things, 2), BACKGROUNDS):
        if first[0] == second[0]:
            continue
        for left, right in product(range(1, MAX_REQUIRED), repeat=2):
            if left + right <= MAX_REQUIRED:
                yield Composition((first,) * left + (second,) * right, background)
        for relation in RELATIONS:
            yield Composition((first, second), background, relation)


def detect(images: Tensor) -> list[Detection]:
    """What each of the pictures (B, 3, H, W), float in [0, 1], shows, in words."""
    found = measure(images)
    colours, shapes, backgrounds = [*COLOURS, None], [*SHAPES, None], [*BACKGROUNDS, None]
    detections = []
    for b, background in enumerate(found.background.tolist()):
        here = found.present[b]
        columns = (found.colour[b, here], found.shape[b, here], found.x[b, here], found.y[b, here])
        rows = zip(*(column.tolist() for column in columns), strict=True)
        objects = tuple((colours[c], shapes[s], x, y) for c, s, x, y in rows)
        detections.append(Detection(objects, backgrounds[background]))
    return detections


def score(images: Tensor, wanted: Sequence[Composition]) -> dict[str, Tensor]:
    """Scores pictures against what they should show.

    Each required object is assigned to at most one detected object such that the sum of the pair scores is largest: 1
    with the right colour and shape, 1/4 with only one of them right, 0 otherwise.

    Args:
        images: (B, 3, H, W) float in [0, 1].
        wanted: B compositions.

    Returns:
        Scores (B,) float32 in [0, 1] on the pictures' device:

        * strict: 1 if everything is right (background, number, colours, shapes and relation), else 0.
        * soft: the assignment's sum over the larger of the required and the detected number, halved if a required
          relation does not hold, halved if the background is wrong.
        * count: 1 if the number of objects is right.
        * color, shape: share of the objects whose colour (shape) is right, whatever else they are.
        * position: 1 if the relation holds between the assigned objects, NaN where none is required.
        * background: 1 if the background is right.
    """
    if len(images) != len(wanted):
        raise ValueError(f"{len(images)} pictures, but {len(wanted)} compositions")
    if not wanted:
        return {name: images.new_zeros(0).float() for name in _SCORES}
    found = measure(images)
    colour, shape, relation, ground = (values.to(images.device) for values in _encode(wanted))
    needed, present = colour >= 0, found.present
    n_needed, n_found = needed.sum(1), present.sum(1)
    larger = torch.maximum(n_needed, n_found).float()

    thing = torch.where(needed, colour * len(SHAPES) + shape, -1)
    clear = present & (found.colour >= 0) & (found.shape >= 0)
    seen = torch.where(clear, found.colour * len(SHAPES) + found.shape, -2)
    exact_needed, exact_seen = _matched(thing, seen, needed)
    n_exact = exact_needed.sum(1)
    same_colour = (colour[:, :, None] == found.colour[:, None]) & needed[:, :, None] & present[:, None]
    same_shape = (shape[:, :, None] == found.shape[:, None]) & needed[:, :, None] & present[:, None]
    # Taking all exact matches first is optimal: giving one up frees at most two half-right ones, worth less together.
    free = (same_colour | same_shape) & ~exact_needed[:, :, None] & ~exact_seen[:, None]
    total = n_exact + _HALF_RIGHT * _matching_size(free, needed & ~exact_needed)

    worth = torch.where(same_colour & same_shape, 1.0, _HALF_RIGHT * (same_colour | same_shape).float())
    holds = _relation_holds(worth, found, relation)
    right_ground = found.background == ground
    soft = total / larger
    soft = torch.where((relation >= 0) & ~holds, _PENALTY * soft, soft)
    soft = torch.where(right_ground, soft, _PENALTY * soft)
    right = right_ground & (n_found == n_needed) & (n_exact == n_needed) & (holds | (relation < 0))
    return {
        "strict": right.float(),
        "soft": soft,
        "count": (n_found == n_needed).float(),
        "color": _matched(colour, torch.where(present, found.colour, -2), needed)[0].sum(1) / larger,
        "shape": _matched(shape, torch.where(present, found.shape, -2), needed)[0].sum(1) / larger,
        "position": torch.where(relation >= 0, holds.float(), torch.nan),
        "background": right_ground.float(),
    }


_SCORES = ("strict", "soft", "count", "color", "shape", "position", "background")


def _encode(wanted: Sequence[Composition]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Indices of colours and shapes (B, 4) padded by -1, relations (B,) with -1 for none, backgrounds (B,)."""
    colours, shapes, grounds = list(COLOURS), list(SHAPES), list(BACKGROUNDS)
    pad = [-1] * MAX_REQUIRED
    return (
        torch.tensor([([colours.index(c) for c, _ in w.objects] + pad)[:MAX_REQUIRED] for w in wanted]),
        torch.tensor([([shapes.index(s) for _, s in w.objects] + pad)[:MAX_REQUIRED] for w in wanted]),
        torch.tensor([-1 if w.relation is None else RELATIONS.index(w.relation) for w in wanted]),
        torch.tensor([grounds.index(w.background) for w in wanted]),
    )


def _matched(needed: Tensor, seen: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs equal labels of needed (B, R) and seen (B, K) one to one; bool masks of the ones that found a partner."""

    def rank(labels: Tensor) -> Tensor:  # how many equal labels come before
        return (labels[:, :, None] == labels[:, None]).tril(-1).sum(2)

    equal = (needed[:, :, None] == seen[:, None]) & mask[:, :, None]
    return mask & (rank(needed) < equal.sum(2)), rank(seen) < equal.sum(1)


def _matching_size(edges: Tensor, free: Tensor) -> Tensor:
    """Size (B,) of the largest matching, edges (B, R, K) bool and usable rows ``free`` (B, R), by König's theorem."""
    rows = edges.shape[1]
    subsets = torch.tensor(list(product((0, 1), repeat=rows)), device=edges.device, dtype=torch.float32)  # (2^R, R)
    neighbours = (torch.einsum("sr,brk->bsk", subsets, edges.float()) > 0).sum(2)
    outside = free.float() @ (1 - subsets).T
    return (outside + neighbours).amin(1)


def _relation_holds(worth: Tensor, found: Measurements, relation: Tensor) -> Tensor:
    """Whether some best assignment of the first two objects, each worth something, has the relation: (B,) bool."""
    subject, other = worth[:, 0, :, None], worth[:, 1, None, :]
    distinct = ~torch.eye(worth.shape[2], dtype=torch.bool, device=worth.device)
    total = (subject + other) * distinct
    dx = found.x[:, None] - found.x[:, :, None]  # from subject (rows) to the other one (columns)
    dy = found.y[:, None] - found.y[:, :, None]
    options = torch.stack([dx > dy.abs(), -dx > dy.abs(), dy > dx.abs(), -dy > dx.abs()], dim=1)
    chosen = options.gather(1, relation.clamp(min=0).view(-1, 1, 1, 1).expand(-1, 1, *dx.shape[1:])).squeeze(1)
    best = total.amax((1, 2), keepdim=True)
    assigned = (total == best) & (subject > 0) & (other > 0) & distinct
    return (assigned & chosen).any(2).any(1) & (relation >= 0)
