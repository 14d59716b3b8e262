"""A picture to tiles of pixels, as each model's processor does it. Pillow alone is imported.

Bytes of a client or a file are decoded in a process with limits (text/processes).
`transformers` judges it (tests/engine/vision).
"""

import io
import math
from collections.abc import Callable, Mapping
from typing import Any

from PIL import Image, ImageOps, UnidentifiedImageError

from orinllm.errors import BadInput

#: Kinds of files; others have had decoders with more surprises.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
#: Bytes of a file, and pixels of a picture, at most.
MOST_BYTES, MOST_PIXELS = 32 << 20, 50_000_000
# Sides of a picture after the first step, at most.
_MOST_SIDE = 4096
# Times the shorter side that the longer one may be (smart_resize of `transformers`).
_MOST_RATIO = 200

Tiles = tuple[list[Image.Image], tuple[int, int]]


def decode_picture(data: bytes) -> Image.Image:
    """Return the first frame of a file, upright, in RGB; raises BadInput for what is none."""
    try:
        return upright_rgb_image(Image.open(io.BytesIO(data), formats=FORMATS))
    except UnidentifiedImageError:
        raise BadInput(f"it is no picture: {', '.join(FORMATS)} were expected") from None
    except Image.DecompressionBombError:
        raise BadInput(f"the picture has more than {MOST_PIXELS:,} pixels") from None


def check_picture_size(width: int, height: int) -> None:
    """Raise BadInput for a picture of no pixels, or of too many."""
    if not 1 <= width * height <= MOST_PIXELS:
        raise BadInput(
            f"the picture has {width} x {height} pixels; 1 to {MOST_PIXELS:,} were expected"
        )


def upright_rgb_image(image: Image.Image) -> Image.Image:
    """Return a picture turned as its EXIF data say, in RGB; what is transparent is white."""
    check_picture_size(*image.size)
    image = ImageOps.exif_transpose(image)
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")


def picture_as_square_tile(image: Image.Image, size: int) -> Tiles:
    """Gemma 3: the whole picture as a square of `size` pixels."""
    return [image.resize((size, size), Image.Resampling.BILINEAR)], (0, 0)


def tiles_and_thumbnail(image: Image.Image, size: int, longest: int) -> Tiles:
    """Idefics 3: tiles of `size` pixels of a picture whose longer side is `longest`, and all of it.

    A picture that is one tile is not cut.
    """
    image = _resize(image, *_size_by_longest_side(image.size, longest))
    image = _resize(image, *_size_in_whole_tiles(image.size, size))
    columns, rows = image.width // size, image.height // size
    if (columns, rows) == (1, 1):
        return [image], (0, 0)
    boxes = [
        (column * size, row * size, (column + 1) * size, (row + 1) * size)
        for row in range(rows)
        for column in range(columns)
    ]
    return [*map(image.crop, boxes), _resize(image, size, size)], (rows, columns)


def picture_in_whole_blocks(image: Image.Image, cell: int, least: int, most: int) -> Tiles:
    """Qwen-VL: the whole picture, in whole blocks of `cell` pixels a side.

    It has from `least` to `most` pixels then, about, and its ratio of sides, which is up to 200.
    """
    width, height = image.size
    if max(width, height) > _MOST_RATIO * min(width, height):
        raise BadInput(
            f"the picture has {width} x {height} pixels; a side of {_MOST_RATIO} times the other "
            "at most was expected"
        )
    wide, high = (round(side / cell) * cell for side in (width, height))
    if wide * high > most:
        ratio = math.sqrt(width * height / most)
        wide, high = (max(cell, math.floor(n / ratio / cell) * cell) for n in (width, height))
    elif wide * high < least:
        ratio = math.sqrt(least / (width * height))
        wide, high = (math.ceil(n * ratio / cell) * cell for n in (width, height))
    return [image.resize((wide, high), Image.Resampling.BICUBIC)], (0, 0)


def _resize(image: Image.Image, width: int, height: int) -> Image.Image:
    return image.resize((width, height), Image.Resampling.LANCZOS)


def _size_by_longest_side(size: tuple[int, int], longest: int) -> tuple[int, int]:
    """Return the size with a longer side of `longest`; the other one is even."""
    width, height = size
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        width, height = int(longest * ratio), longest
        width += width % 2
    width, height = max(width, 1), max(height, 1)
    ratio = width / height
    if width >= height and width > _MOST_SIDE:
        width, height = _MOST_SIDE, int(_MOST_SIDE / ratio)
    elif height > width and height > _MOST_SIDE:
        width, height = int(_MOST_SIDE * ratio), _MOST_SIDE
    return max(width, 1), max(height, 1)


def _size_in_whole_tiles(size: tuple[int, int], tile: int) -> tuple[int, int]:
    """Return the size in whole tiles: the longer side first, the other one as the ratio says."""
    width, height = size
    ratio = width / height
    if width >= height:
        width = math.ceil(width / tile) * tile
        height = math.ceil(max(int(width / ratio), 1) / tile) * tile
    else:
        height = math.ceil(height / tile) * tile
        width = math.ceil(max(int(height * ratio), 1) / tile) * tile
    return width, height


#: Ways to prepare a picture, by the name that a projector gives.
WAYS: Mapping[str, Callable[..., Tiles]] = {
    "square": picture_as_square_tile,
    "tiled": tiles_and_thumbnail,
    "blocks": picture_in_whole_blocks,
}


def tiles_and_grid(source: bytes | Image.Image, way: str, sizes: Mapping[str, Any]) -> Tiles:
    """Return the tiles of a file or an image, and their grid (pictures.py: Prepared).

    Raises BadInput, one line, for what is none.
    """
    try:
        image = decode_picture(source) if isinstance(source, bytes) else upright_rgb_image(source)
        return WAYS[way](image, **sizes)
    except (BadInput, MemoryError):
        raise
    except Exception as error:  # what Pillow raises of a damaged picture may be anything
        said = f"the picture is damaged: {type(error).__name__}: {error}"
        raise BadInput(" ".join(said[:1000].split())) from None
