"""Pictures of requests: drawn, so that no server knows one, and what they take of a prompt."""

import base64
import io
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from orinbench.errors import BenchError
from orinllm.errors import BadInput
from orinllm.network.vision.prepare import MOST_PIXELS, prepare
from orinllm.sight import read_projector

_SIZE = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})")
# Pixels of a side that are drawn as one, and smoothed: JPEG keeps what an encoder sees.
_COARSE = 20
# Tokens of text that stand around a tile at most.
_AROUND = 16


@dataclass(frozen=True)
class Pictures:
    """Pictures of so many pixels, each another one."""

    width: int
    height: int
    seed: int

    @staticmethod
    def parse(text: str, seed: int) -> "Pictures":
        """Return the pictures of `--picture`, as 640x480; raises BenchError for no such size."""
        found = _SIZE.fullmatch(text)
        if found is None or int(found[1]) * int(found[2]) > MOST_PIXELS:
            raise BenchError(
                f"--picture {text}: no size; WIDTHxHEIGHT was expected, as 640x480, of "
                f"{MOST_PIXELS:,} pixels at most"
            )
        return Pictures(int(found[1]), int(found[2]), seed)

    def draw(self, number: int) -> Image.Image:
        """Return a picture."""
        rng = np.random.default_rng([self.seed, number])
        sides = (-(-side // _COARSE) for side in (self.height, self.width))
        coarse = Image.fromarray(rng.integers(0, 256, (*sides, 3), np.uint8))
        return coarse.resize((self.width, self.height), Image.Resampling.BICUBIC)

    def uri(self, number: int) -> str:
        """Return a picture as a data URI of a JPEG file."""
        file = io.BytesIO()
        self.draw(number).save(file, "JPEG", quality=90)
        return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"

    def rows(self, mmproj: Path) -> int:
        """Return the tokens that a picture, and what is around it, takes; raises BenchError."""
        try:
            _, projector = read_projector(mmproj)
        except BadInput as error:
            raise BenchError(str(error)) from None
        tiles, _ = prepare(self.draw(0), projector.way, projector.sizes)
        rows = sum(projector.rows_of(tile.height, tile.width) for tile in tiles)
        return rows + _AROUND * (1 + len(tiles))
