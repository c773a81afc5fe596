"""Finds the coloured objects in a picture of the shapes world: pure, batched torch.

A picture of this world shows up to a handful of small coloured shapes on a plain background. Every pixel is explained
as a mixture of the background and one palette colour; pixels that are more than half object form connected
components; each component gets a colour by majority vote and a shape by comparing its anti-aliased coverage with
templates of the same area and centroid (sub-pixel exact, so the comparison does not depend on size or position).

The renderer of the training pictures uses :func:`coverage` too: what is drawn and what is looked for are one formula.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (220, 40, 40),
    "green": (30, 160, 60),
    "blue": (50, 80, 235),
    "yellow": (245, 215, 50),
    "purple": (180, 45, 200),
    "cyan": (60, 210, 235),
}
BACKGROUNDS: dict[str, tuple[int, int, int]] = {"black": (10, 10, 10), "white": (245, 245, 245)}
SHAPES: tuple[str, ...] = ("diamond", "square", "triangle")

MAX_OBJECTS = 16  # components kept per picture, largest first
_MIN_PIXELS = 5  # smaller components are specks, not objects
_MIN_AREA, _MAX_AREA = 10.0, 42.0  # px^2 an object may cover: true ones have 17 to 31
_MIN_VOTE = 0.6  # share of a component's pixels that must agree on its colour
_MIN_IOU = 0.7  # soft intersection over union with the best template
_MAX_RESIDUAL = 0.3  # RGB distance up to which a pixel counts as the mixture that explains it best
_BACKGROUND_RADIUS, _BACKGROUND_SHARE = 0.2, 0.5  # this share of all pixels must lie this near to the background
_WINDOW = 5  # templates are compared within +-5 px of the centroid
_MAX_SWEEPS = 128  # label propagation: a one-object component settles within its own diameter

# Per unit scale: areas in px^2, and how far below the origin (middle of the bounding box) the centroid lies, in px.
_DIAMOND_RADIUS, _SQUARE_HALF, _TRIANGLE_BASE_HALF, _TRIANGLE_HEIGHT_HALF = 3.5, 2.65, 3.3, 3.1
_UNIT_AREA = (2 * _DIAMOND_RADIUS**2, 4 * _SQUARE_HALF**2, 2 * _TRIANGLE_BASE_HALF * _TRIANGLE_HEIGHT_HALF)
_UNIT_CENTROID = (0.0, 0.0, _TRIANGLE_HEIGHT_HALF / 3)


def rgb(colours: dict[str, tuple[int, int, int]]) -> Tensor:
    """The palette as a float tensor (n, 3) in [0, 1]."""
    return torch.tensor(list(colours.values()), dtype=torch.float32) / 255


def coverage(shape: int, dx: Tensor, dy: Tensor, scale: Tensor) -> Tensor:
    """How much of each pixel a shape covers.

    Args:
        shape: index into :data:`SHAPES`.
        dx: horizontal distance of the pixel centres from the shape's origin, px, to the right.
        dy: vertical distance, px, downwards; broadcasts with ``dx``.
        scale: size relative to the nominal one; broadcasts with ``dx``.

    Returns:
        Coverage in [0, 1], anti-aliased over one pixel.
    """
    match SHAPES[shape]:
        case "diamond":
            inside = (_DIAMOND_RADIUS * scale - dx.abs() - dy.abs()) * 0.5**0.5
        case "square":
            inside = _SQUARE_HALF * scale - torch.maximum(dx.abs(), dy.abs())
        case _:
            slope = _TRIANGLE_BASE_HALF / (2 * _TRIANGLE_HEIGHT_HALF)
            side = ((dy + _TRIANGLE_HEIGHT_HALF * scale) * slope - dx.abs()) / (1 + slope**2) ** 0.5
            inside = torch.minimum(_TRIANGLE_HEIGHT_HALF * scale - dy, side)
    return (inside + 0.5).clamp(0, 1)


@dataclass(frozen=True)
class Measurements:
    """What was found in a batch of B pictures, with K = :data:`MAX_OBJECTS` slots each.

    Attributes:
        present: (B, K) bool, the slot holds an object; every other field is meaningless where it does not.
        colour: (B, K) int64, index into :data:`COLOURS`, -1 where no colour has a majority.
        shape: (B, K) int64, index into :data:`SHAPES`, -1 where none fits.
        x: (B, K) centroid, px from the left edge.
        y: (B, K) centroid, px from the top edge.
        area: (B, K) covered area, px^2.
        background: (B,) int64, index into :data:`BACKGROUNDS`, -1 where the picture has no plain background.
    """

    present: Tensor
    colour: Tensor
    shape: Tensor
    x: Tensor
    y: Tensor
    area: Tensor
    background: Tensor


@torch.no_grad()
def measure(images: Tensor) -> Measurements:
    """Finds the objects of every picture.

    Args:
        images: (B, 3, H, W) float in [0, 1]; anything outside is clamped and NaN counts as black.

    Returns:
        Measurements on the pictures' device; each picture's result is independent of the others.
    """
    if images.ndim != 4 or images.shape[1] != 3:
        raise ValueError(f"expected pictures of shape (B, 3, H, W), got {tuple(images.shape)}")
    batch, _, height, width = images.shape
    pixels = images.detach().float().nan_to_num(0.0).clamp(0, 1).flatten(2)
    background, nearest = _background(pixels)
    label, cover = _explain(pixels, nearest)
    component = _components((cover > 0.5).view(batch, 1, height, width)).flatten(1)

    sizes = pixels.new_zeros(batch, height * width + 1).scatter_add_(1, component, torch.ones_like(cover))
    count = min(MAX_OBJECTS, height * width)
    size, root = sizes[:, 1:].topk(count, dim=1)
    present = size >= _MIN_PIXELS
    owner, slot = present.nonzero(as_tuple=True)  # the M objects of the whole batch, as one flat list

    # A faint rim pixel belongs to the component next to it: its coverage counts, but it has no vote on the colour.
    grown = _grow(component.view(batch, 1, height, width)).flatten(1)
    rim = torch.where(component > 0, component, grown)
    names = (root + 1)[present][:, None]
    weight = (rim[owner] == names) * cover[owner]  # (M, HW)
    votes = pixels.new_zeros(len(owner), len(COLOURS))
    votes.scatter_add_(1, label[owner].clamp(min=0), ((component[owner] == names) & (label[owner] >= 0)).float())
    share = votes / size[present][:, None]

    area = weight.sum(1)
    # Integers plus 0.5 would take the default dtype, which a run in half precision lowers.
    ys = torch.arange(height, device=images.device, dtype=torch.float32).repeat_interleave(width) + 0.5
    xs = torch.arange(width, device=images.device, dtype=torch.float32).repeat(height) + 0.5
    x, y = (weight @ xs) / area, (weight @ ys) / area
    shape = _classify(weight.view(-1, height, width), x, y, area)
    colour = torch.where(share.amax(1) >= _MIN_VOTE, share.argmax(1), -1)

    def slots(values: Tensor) -> Tensor:
        return values.new_zeros(batch, count).index_put_((owner, slot), values)

    return Measurements(present, slots(colour), slots(shape), slots(x), slots(y), slots(area), background)


def _background(pixels: Tensor) -> tuple[Tensor, Tensor]:
    """The background's index or -1 (B,), and the colour to measure coverage against (B, 3); pixels (B, 3, N)."""
    palette = rgb(BACKGROUNDS).to(pixels.device)
    distance = (pixels[:, None] - palette[None, :, :, None]).square().sum(2)
    share, index = (distance < _BACKGROUND_RADIUS**2).float().mean(-1).max(1)
    return torch.where(share >= _BACKGROUND_SHARE, index, -1), palette[index]


def _explain(pixels: Tensor, background: Tensor) -> tuple[Tensor, Tensor]:
    """Explains each pixel as (1 - a) background + a colour: the best colour or -1, and a in [0, 1]; both (B, N)."""
    offset = pixels - background[:, :, None]
    direction = rgb(COLOURS).to(pixels.device)[None] - background[:, None]  # (B, colours, 3)
    length = direction.square().sum(-1, keepdim=True)
    projection = (direction @ offset) / length
    alpha = projection.clamp(0, 1)
    residual = offset.square().sum(1, keepdim=True) + length * alpha * (alpha - 2 * projection)
    best, label = residual.min(1)
    cover = alpha.gather(1, label[:, None]).squeeze(1)
    return torch.where(best < _MAX_RESIDUAL**2, label, -1), cover


def _grow(values: Tensor) -> Tensor:
    """The largest of each pixel and its eight neighbours, (..., H, W) >= 0; much faster than pooling."""
    wide = F.pad(values, (1, 1))
    rows = torch.maximum(torch.maximum(wide[..., :-2], wide[..., 2:]), values)
    tall = F.pad(rows, (0, 0, 1, 1))
    return torch.maximum(torch.maximum(tall[..., :-2, :], tall[..., 2:, :]), rows)


def _components(mask: Tensor) -> Tensor:
    """Labels 8-connected components: (B, 1, H, W) int64, 0 outside, else one plus the largest pixel index inside."""
    where = mask.to(torch.int32)
    label = torch.arange(1, mask[0].numel() + 1, device=mask.device, dtype=torch.int32).view(1, *mask.shape[1:]) * where
    for _ in range(_MAX_SWEEPS // 4):
        before = label
        for _ in range(4):
            label = _grow(label) * where
        if torch.equal(before, label):
            break
    return label.long()


def _classify(weight: Tensor, x: Tensor, y: Tensor, area: Tensor) -> Tensor:
    """Names the shape of M objects from their coverage (M, H, W), centroids (M,) in px and areas (M,) in px^2."""
    height, width = weight.shape[1:]
    reach = torch.arange(-_WINDOW, _WINDOW + 1, device=weight.device)
    rows = y.floor().long()[:, None] + reach  # (M, 11)
    cols = x.floor().long()[:, None] + reach
    inside = ((rows >= 0) & (rows < height))[:, :, None] & ((cols >= 0) & (cols < width))[:, None, :]
    index = rows.clamp(0, height - 1)[:, :, None] * width + cols.clamp(0, width - 1)[:, None, :]
    seen = weight.flatten(1).gather(1, index.flatten(1)).view_as(index) * inside
    dx = (cols.float() + 0.5 - x[:, None])[:, None, :]
    dy = (rows.float() + 0.5 - y[:, None])[:, :, None]
    overlap = []
    for shape in range(len(SHAPES)):
        scale = (area / _UNIT_AREA[shape]).sqrt()[:, None, None]
        template = coverage(shape, dx, dy + _UNIT_CENTROID[shape] * scale, scale) * inside
        common = torch.minimum(seen, template).sum((1, 2))
        overlap.append(common / (area + template.sum((1, 2)) - common))
    best, shape_index = torch.stack(overlap).max(0)
    fits = (best >= _MIN_IOU) & (area >= _MIN_AREA) & (area <= _MAX_AREA)
    return torch.where(fits, shape_index, -1)
