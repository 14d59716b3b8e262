"""Pictures of requests: drawn, so that no server knows one, and what they take of a prompt."""

import base64
import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from orinbench.errors import BenchError
from orinllm.errors import BadInput
from orinllm.loader import Network
from orinllm.mmproj import PictureEncoder, enable_pictures, network_for_pictures, read_mmproj
from orinllm.model import ModelDescription
from orinllm.network.vision.pictures import Picture
from orinllm.network.vision.prepare import MOST_PIXELS, tiles_and_grid

_SIZE = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})")
# Pixels of a side that are drawn as one, and smoothed: JPEG keeps what an encoder sees.
_COARSE = 20
# Tokens of text that stand around a tile at most.
_AROUND = 16
#: What stands behind a picture, where the time to an answer's first text is measured.
QUESTION = "What does this picture show? Say it in one short sentence, the largest thing first."


@dataclass(frozen=True)
class RandomPictures:
    """Pictures of so many pixels, each another one."""

    width: int
    height: int
    seed: int

    @staticmethod
    def parse(text: str, seed: int) -> "RandomPictures":
        """Return the pictures of `--picture`, as 640x480; raises BenchError for no such size."""
        found = _SIZE.fullmatch(text)
        if found is None or int(found[1]) * int(found[2]) > MOST_PIXELS:
            raise BenchError(
                f"--picture {text}: no size; WIDTHxHEIGHT was expected, as 640x480, of "
                f"{MOST_PIXELS:,} pixels at most"
            )
        return RandomPictures(int(found[1]), int(found[2]), seed)

    def draw(self, number: int) -> Image.Image:
        """Return a picture."""
        rng = np.random.default_rng([self.seed, number])
        sides = (-(-side // _COARSE) for side in (self.height, self.width))
        coarse = Image.fromarray(rng.integers(0, 256, (*sides, 3), np.uint8))
        return coarse.resize((self.width, self.height), Image.Resampling.BICUBIC)

    def jpeg(self, number: int) -> bytes:
        """Return a picture as a JPEG file."""
        file = io.BytesIO()
        self.draw(number).save(file, "JPEG", quality=90)
        return file.getvalue()

    def data_uri(self, number: int) -> str:
        """Return a picture as a data URI of a JPEG file."""
        return f"data:image/jpeg;base64,{base64.b64encode(self.jpeg(number)).decode()}"

    def token_count(self, mmproj: Path) -> int:
        """Return the tokens that a picture, and what is around it, takes; raises BenchError."""
        try:
            _, projector = read_mmproj(mmproj)
        except BadInput as error:
            raise BenchError(str(error)) from None
        tiles, _ = tiles_and_grid(self.draw(0), projector.way, projector.sizes)
        rows = sum(projector.tile_row_count(tile.height, tile.width) for tile in tiles)
        return rows + _AROUND * (1 + len(tiles))


class VisionModel:
    """A model that sees on a device, as what is timed needs it; raises BadInput for others."""

    def __init__(self, network: Network, mmproj: Path, device: str) -> None:
        template = ModelDescription.from_network(network).template
        enable_pictures(template, mmproj, network, device)
        assert template is not None and template.picture_encoder is not None
        self._template = template
        self.encoder: PictureEncoder = template.picture_encoder

    @staticmethod
    def read(model: Path, mmproj: Path) -> "VisionModel":
        """Read a model's files, to know how long prompts with pictures are."""
        return VisionModel(network_for_pictures(Network.read(model), mmproj), mmproj, "CPU")

    def picture_prompt(self, picture: Any) -> list[int]:
        """Return the prompt of a picture and QUESTION, whose tokens are the last ones."""
        seen: Picture = self.encoder.prepare_picture(picture)
        parts = [{"type": "image", "image": seen}, {"type": "text", "text": QUESTION}]
        return self._template.encode([{"role": "user", "content": parts}])

    @property
    def projector_label(self) -> str:
        """The projector, the commonest type of its matrices, and their bytes."""
        tensors = self.encoder.gguf.tensors.values()
        types = [tensor.type.name for tensor in tensors if len(tensor.shape) > 1]
        common = max(dict.fromkeys(types), key=types.count)
        return f"{self.encoder.projector.kind} {common} {self.encoder.gguf.n_tensor_bytes}"
