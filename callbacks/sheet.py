"""Contact sheets: pictures side by side, each with its caption, under one headline."""

from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

_FONT_SIZE = 13
_LINE = 17
_GAP = 10
_MAX_LINES = 4
_INK, _PAPER = (20, 20, 20), (228, 228, 228)  # darker than the white grounds of pictures

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


def caption_font(path: Path | None) -> Font:
    """The font of captions: of a TrueType file, or Pillow's own, which has the letters of English only.

    Raises:
        ValueError: if the file cannot be read.
    """
    if path is None:
        return ImageFont.load_default(_FONT_SIZE)
    try:
        return ImageFont.truetype(path, _FONT_SIZE)
    except OSError as e:
        raise ValueError(f"font is {path}; it must be a TrueType or OpenType file: {e}") from None


def fit(picture: Image.Image, side: int) -> Image.Image:
    """The picture as large as it fits into a square: enlarged by a whole factor, pixels staying pixels, or reduced."""
    longest = max(picture.size)
    if longest <= side:
        factor = side // longest
        return picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)
    size = (max(round(picture.width * side / longest), 1), max(round(picture.height * side / longest), 1))
    return picture.resize(size, Image.Resampling.LANCZOS)


def wrap(text: str, width: float, font: Font) -> list[str]:
    """The text in lines of at most ``width`` px, broken between words, and inside of one that is wider than a line."""
    lines: list[str] = []
    for paragraph in text.splitlines():
        line = ""
        for word in paragraph.split():
            candidate = f"{line} {word}" if line else word
            if font.getlength(candidate) <= width:
                line = candidate
                continue
            if line:
                lines.append(line)
            while font.getlength(word) > width and len(word) > 1:
                cut = next(n for n in range(len(word) - 1, 0, -1) if n == 1 or font.getlength(word[:n]) <= width)
                lines.append(word[:cut])
                word = word[cut:]
            line = word
        lines.append(line)
    return lines


def contact_sheet(
    pictures: Sequence[Image.Image],
    captions: Sequence[str],
    headline: str,
    columns: int = 4,
    side: int = 256,
    font: Font | None = None,
) -> Image.Image:
    """Lay pictures out in rows.

    Args:
        pictures: of any sizes.
        captions: one a picture, set under it. Its first line may take up to four lines on the sheet; what does not fit
            is cut off with an ellipsis. Further lines are kept.
        headline: set above all, in as many lines as it needs.
        columns: pictures in a row.
        side: px that the longer side of a picture may take. Smaller pictures are enlarged by whole factors.
        font: of all text; see :func:`caption_font`.

    Returns:
        An RGB image.
    """
    font = font or caption_font(None)
    tiles = [fit(picture.convert("RGB"), side) for picture in pictures]
    columns = min(columns, len(tiles))
    width, height = max(t.width for t in tiles), max(t.height for t in tiles)
    texts = [_caption(caption, width, font) for caption in captions]
    cell = width + _GAP, height + _LINE * max(map(len, texts)) + _GAP + _LINE // 3
    rows = -(-len(tiles) // columns)
    head = wrap(headline, columns * cell[0] - _GAP, font)
    top = _GAP + _LINE * len(head) + (_GAP if head else 0)
    sheet = Image.new("RGB", (columns * cell[0] + _GAP, top + rows * cell[1]), _PAPER)
    draw = ImageDraw.Draw(sheet)
    for i, line in enumerate(head):
        draw.text((_GAP, _GAP + i * _LINE), line, _INK, font)
    for i, (tile, text) in enumerate(zip(tiles, texts)):
        x, y = _GAP + i % columns * cell[0], top + i // columns * cell[1]
        sheet.paste(tile, (x + (width - tile.width) // 2, y + (height - tile.height) // 2))
        for k, line in enumerate(text):
            draw.text((x, y + height + _LINE // 3 + k * _LINE), line, _INK, font)
    return sheet


def _caption(text: str, width: float, font: Font) -> list[str]:
    first, _, rest = text.partition("\n")
    lines = wrap(first, width, font)
    if len(lines) > _MAX_LINES:
        last = lines[_MAX_LINES - 1]
        while last and font.getlength(last + "…") > width:
            last = last[:-1]
        lines = [*lines[: _MAX_LINES - 1], last + "…"]
    return lines + wrap(rest, width, font)
