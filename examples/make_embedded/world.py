"""The shapes world: which prompts are held out, and pictures that fulfil a prompt.

Pictures are 32x32; a 4x4 grid of 8-px cells holds at most one object per cell, so that one cell is one token of the
transformer (VAE factor 4, patch 2).
"""

import random
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from lit_diffrl.callbacks.rewards.composition import KINDS, RELATIONS, Composition, caption, compositions
from lit_diffrl.callbacks.rewards.shape_detector import BACKGROUNDS, COLOURS, SHAPES, coverage, rgb

SIDE = 32  # px
GRID = 4  # cells per side
_CELL = SIDE // GRID
_SCALE = (0.93, 1.04)  # object size relative to the nominal one
_JITTER = 0.15  # px, of the centres
_HELD_OUT = {"single": 3, "count": 3, "pair": 5, "relation": 5}  # one in so many; more of the kinds with few prompts
_MIRROR = dict(zip(RELATIONS, ("right of", "left of", "below", "above"), strict=True))


def meaning(composition: Composition) -> str:
    """One caption for all prompts that ask for the same, such as 'a left of b' and 'b right of a'."""
    if composition.kind == "pair":
        ordered = tuple(sorted(composition.objects))
        return caption(Composition(ordered, composition.background))
    if composition.relation in ("right of", "below"):
        mirrored = _MIRROR[composition.relation]
        return caption(Composition(composition.objects[::-1], composition.background, mirrored))
    return caption(composition)


def split(composition: Composition) -> str:
    """'train', 'val' or 'test': a stable hash of the meaning, so that no held-out prompt has a twin in training."""
    key = zlib.crc32(meaning(composition).encode())
    if key % _HELD_OUT[composition.kind]:
        return "train"
    return "val" if zlib.crc32(b"split:" + meaning(composition).encode()) % 2 else "test"


def by_kind(part: str) -> dict[str, list[Composition]]:
    """The compositions of a split, by kind, in a fixed order."""
    table: dict[str, list[Composition]] = {kind: [] for kind in KINDS}
    for composition in compositions():
        if split(composition) == part:
            table[composition.kind].append(composition)
    return table


def sample_compositions(
    number: int, shares: dict[str, float], table: dict[str, list[Composition]], rng: random.Random
) -> list[Composition]:
    """Draws compositions: the kind by its share, then uniformly within the kind."""
    kinds = rng.choices(list(shares), weights=list(shares.values()), k=number)
    return [rng.choice(table[kind]) for kind in kinds]


def corrupt(composition: Composition, rng: random.Random) -> Composition:
    """Makes one attribute (colour, shape, number or relation) wrong; the kind stays, and nothing held out appears."""
    while True:
        objects, relation = list(composition.objects), composition.relation
        old = rng.choice(objects)
        match rng.choice(("colour", "shape", "number" if relation is None else "relation")):
            case "colour":
                new = (rng.choice(list(COLOURS)), old[1])
                objects = [new if thing == old else thing for thing in objects]
            case "shape":
                new = (old[0], rng.choice(SHAPES))
                objects = [new if thing == old else thing for thing in objects]
            case "number":
                place = objects.index(old)
                objects[place : place + objects.count(old)] = [old] * rng.randint(1, 3)
            case _:
                relation = rng.choice(RELATIONS)
        try:
            wrong = Composition(tuple(objects), composition.background, relation)
        except ValueError:
            continue
        if wrong != composition and wrong.kind == composition.kind and split(wrong) == "train":
            return wrong


def _related_cells() -> dict[str, list[tuple[int, int]]]:
    """Pairs of cells, as row-major indices, between which each relation clearly holds.

    The two lie in opposite halves of the picture, so that a relation also says something about the place of each.
    """
    half = GRID // 2
    pairs: dict[str, list[tuple[int, int]]] = {relation: [] for relation in RELATIONS}
    for first in range(GRID**2):
        for second in range(GRID**2):
            (y1, x1), (y2, x2) = divmod(first, GRID), divmod(second, GRID)
            dy, dx = y2 - y1, x2 - x1
            holds = (dx > abs(dy), -dx > abs(dy), dy > abs(dx), -dy > abs(dx))
            across = (x1 < half <= x2, x2 < half <= x1, y1 < half <= y2, y2 < half <= y1)
            for relation, true, apart in zip(RELATIONS, holds, across, strict=True):
                if true and apart:
                    pairs[relation].append((first, second))
    return pairs


_RELATED = _related_cells()


def placed_caption(composition: Composition, side: str) -> str:
    """A caption that says in which half of the picture the object is: 'a red square left on black'."""
    return caption(composition).replace("one ", "a ").replace(" on ", f" {side.removesuffix(' of')} on ")


def render(wanted: Sequence[Composition], generator: torch.Generator, sides: Sequence[str] | None = None) -> Tensor:
    """Pictures (B, 3, 32, 32) in [0, 1] that fulfil the compositions, with random placement, size and jitter.

    Args:
        wanted: what the pictures show.
        generator: of everything that is random.
        sides: relations, one for each picture; the first object lies where the subject of that relation would.
    """
    batch, most = len(wanted), max(len(w.objects) for w in wanted)
    cells = torch.rand(batch, GRID**2, generator=generator).argsort(1)[:, :most]
    draws = torch.randint(1 << 30, (batch,), generator=generator).tolist()
    colours = torch.zeros(batch, most, dtype=torch.long)
    shapes = torch.full((batch, most), -1)
    for b, composition in enumerate(wanted):
        for k, (colour, shape) in enumerate(composition.objects):
            colours[b, k], shapes[b, k] = list(COLOURS).index(colour), SHAPES.index(shape)
        if composition.relation is not None:
            pairs = _RELATED[composition.relation]
            cells[b, :2] = torch.tensor(pairs[draws[b] % len(pairs)])
        elif sides is not None:
            pairs = _RELATED[sides[b]]
            cells[b, 0] = pairs[draws[b] % len(pairs)][0]
    grounds = torch.tensor([list(BACKGROUNDS).index(w.background) for w in wanted])
    return _draw(grounds, cells, colours, shapes, generator)


def render_dense(number: int, generator: torch.Generator) -> Tensor:
    """Pictures (B, 3, 32, 32) with each cell filled at a rate drawn from U(0, 1): what the VAE learns shapes from."""
    size = (number, GRID**2)
    filled = torch.rand(size, generator=generator) < torch.rand(number, 1, generator=generator)
    shapes = torch.where(filled, torch.randint(len(SHAPES), size, generator=generator), -1)
    colours = torch.randint(len(COLOURS), size, generator=generator)
    grounds = torch.randint(len(BACKGROUNDS), (number,), generator=generator)
    return _draw(grounds, torch.arange(GRID**2).expand(size), colours, shapes, generator)


def _draw(grounds: Tensor, cells: Tensor, colours: Tensor, shapes: Tensor, generator: torch.Generator) -> Tensor:
    """Paints objects (B, K), given by cell, colour and shape index (-1 for none), on backgrounds (B,)."""
    batch, most = cells.shape
    scale = torch.empty(batch, most).uniform_(*_SCALE, generator=generator)
    jitter = torch.empty(2, batch, most).uniform_(-_JITTER, _JITTER, generator=generator)
    y = (cells // GRID + 0.5) * _CELL + jitter[0]
    x = (cells % GRID + 0.5) * _CELL + jitter[1]
    axis = torch.arange(SIDE) + 0.5
    images = rgb(BACKGROUNDS)[grounds][:, :, None, None].repeat(1, 1, SIDE, SIDE)
    paint = rgb(COLOURS)[colours]
    for k in range(most):
        dx = axis.view(1, 1, -1) - x[:, k, None, None]
        dy = axis.view(1, -1, 1) - y[:, k, None, None]
        size, cover = scale[:, k, None, None], torch.zeros(batch, SIDE, SIDE)
        for shape in range(len(SHAPES)):
            cover = torch.where((shapes[:, k] == shape)[:, None, None], coverage(shape, dx, dy, size), cover)
        images = torch.lerp(images, paint[:, k, :, None, None].expand_as(images), cover[:, None])
    return images
