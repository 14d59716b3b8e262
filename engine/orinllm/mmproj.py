"""A model that sees: an mmproj file beside a language model's, and pictures as rows of prompts."""

import base64
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from orinllm.errors import BadInput
from orinllm.file.gguf import GGUF
from orinllm.gpu.path_plan import require_known_types
from orinllm.loader import Network
from orinllm.network.vision.encoder import MmprojConfig
from orinllm.network.vision.gemma3 import gemma3_mmproj
from orinllm.network.vision.header import ClipHeader
from orinllm.network.vision.idefics3 import idefics3_mmproj
from orinllm.network.vision.pictures import (
    MOST_ROWS,
    Floats,
    Picture,
    Pixels,
    PreparedPicture,
    find_or_make_picture,
)
from orinllm.network.vision.prepare import MOST_BYTES, check_picture_size, tiles_and_grid
from orinllm.network.vision.qwen import qwen2vl_mmproj, qwen3vl_mmproj, qwen25vl_mmproj
from orinllm.text.processes.job_process import JobProcess
from orinllm.text.template import ChatTemplate

#: Projectors, by the name that a file has for them.
PROJECTORS: Mapping[str, Callable[[ClipHeader], MmprojConfig]] = {
    "gemma3": gemma3_mmproj,
    "idefics3": idefics3_mmproj,
    "qwen2vl_merger": qwen2vl_mmproj,
    "qwen2.5vl_merger": qwen25vl_mmproj,
    "qwen3vl_merger": qwen3vl_mmproj,
}
# CPU seconds and bytes of the process that decodes a picture.
_SECONDS, _MEMORY = 20.0, 2 << 30

#: Makes the rows of a picture's tiles.
Encode = Callable[[Sequence[Pixels]], Floats]


@functools.cache
def _shared_picture_process() -> JobProcess:
    return JobProcess("orinllm.text.processes.picture_process", _SECONDS, _MEMORY)


@dataclass(frozen=True)
class PictureEncoder:
    """A projector, and what computes its encoder."""

    gguf: GGUF
    projector: MmprojConfig
    encode: Encode
    # Another one of the same path may be of another file or device: its rows are not these.
    _number: int = field(default_factory=itertools.count().__next__)

    @staticmethod
    def read(path: str | Path, network: Network, device: str) -> "PictureEncoder":
        """Read an mmproj file for a language model on a device; raises BadInput, one line."""
        clip, projector = read_matching_mmproj(path, network)
        return PictureEncoder(clip, projector, make_encode_function(device, clip, projector))

    def prepare_picture(self, source: Any) -> Picture:
        """Return a picture of a file's bytes, of a path, of a PIL image or of an array.

        An array is (height, width), (height, width, 3) or (height, width, 4), of bytes. Raises
        BadInput for what is none.
        """
        if isinstance(source, Picture):
            return source
        if isinstance(source, str | Path):
            data = read_picture_bytes(source)
            try:
                return self.prepare_picture(data)
            except BadInput as error:
                raise BadInput(f"{source}: {error}") from None
        file = isinstance(source, bytes | bytearray)
        tiles, grid = self._file_tiles(source) if file else self._image_tiles(source)
        sides = [tile.shape[:2] for tile in tiles]
        n_rows = sum(self.projector.tile_row_count(*side) for side in sides)
        if n_rows > MOST_ROWS:
            raise BadInput(f"the picture has {n_rows:,} rows; {MOST_ROWS:,} at most were expected")
        prepared = PreparedPicture(tiles, grid, self.projector.block_grid(*sides[0]))
        return find_or_make_picture(
            f"{self._number}", prepared, n_rows, lambda p: self.encode(p.tiles)
        )

    def _file_tiles(self, data: bytes | bytearray) -> tuple[tuple[Pixels, ...], tuple[int, int]]:
        if len(data) > MOST_BYTES:
            most = f"{MOST_BYTES:,} at most were expected"
            raise BadInput(f"the picture has {len(data):,} bytes; {most}")
        job = {"way": self.projector.way, "sizes": dict(self.projector.sizes)}
        found = _shared_picture_process().run_job({**job, "data": base64.b64encode(data).decode()})
        tiles = tuple(
            np.frombuffer(base64.b64decode(raw), np.uint8).reshape(height, width, 3)
            for height, width, raw in found["tiles"]
        )
        return tiles, (found["grid"][0], found["grid"][1])

    def _image_tiles(self, source: Any) -> tuple[tuple[Pixels, ...], tuple[int, int]]:
        from PIL import Image

        image = (
            source if isinstance(source, Image.Image) else Image.fromarray(_checked_pixels(source))
        )
        tiles, grid = tiles_and_grid(image, self.projector.way, self.projector.sizes)
        return tuple(np.asarray(tile) for tile in tiles), grid

    def prompt_text(self, picture: Picture, bare: bool = False) -> str:
        """Return what stands for a picture in a prompt's text; `bare`: nothing stands around it."""
        if bare and self.projector.bare is not None:
            return self.projector.bare
        return self.projector.text(picture.grid)

    def insert_picture_rows(
        self, ids: Sequence[int], slot: int, pictures: Sequence[Picture]
    ) -> list[int]:
        """Return a prompt's tokens with the rows of its pictures at their slots."""
        tiles = [
            picture.ids[at : at + picture.n_rows // picture.n_tiles]
            for picture in pictures
            for at in range(0, picture.n_rows, picture.n_rows // picture.n_tiles)
        ]
        if (slots := sum(token == slot for token in ids)) != len(tiles):
            raise BadInput(f"the prompt has {slots} places for {len(tiles)} tiles of pictures")
        rows = iter(tiles)
        found: list[int] = []
        for token in ids:
            if token != slot or self.projector.kept:
                found.append(token)
            if token == slot:
                found += next(rows)
        return found


def _checked_pixels(source: Any) -> Pixels:
    """Return an array of pixels; raises BadInput for what is none."""
    try:
        array = np.asarray(source)
    except ValueError:  # of lists of several lengths
        array = np.empty(0, object)
    if array.dtype != np.uint8 or not (array.ndim == 2 or array.shape[2:] in ((3,), (4,))):
        raise BadInput(
            f"a picture is {type(source).__name__} of {array.dtype} {array.shape}; bytes of "
            "(height, width), (height, width, 3) or (height, width, 4) were expected, or a PIL "
            "image"
        )
    check_picture_size(array.shape[1], array.shape[0])  # before it is copied
    return array


def read_mmproj(path: str | Path) -> tuple[GGUF, MmprojConfig]:
    """Read an mmproj file; raises BadInput, one line, for a projector that is not supported."""
    gguf = GGUF.open(path)
    metadata = gguf.metadata
    if (what := metadata.get("general.architecture")) != "clip":
        raise BadInput(
            f"{path}: its architecture is {what!r}; clip was expected, of a file that llama.cpp "
            "calls mmproj"
        )
    kind = metadata.get("clip.projector_type") or metadata.get("clip.vision.projector_type")
    if not isinstance(kind, str) or kind not in PROJECTORS:
        raise BadInput(
            f"{path}: projector {kind!r} is not supported; supported are {', '.join(PROJECTORS)}"
        )
    require_known_types(gguf)
    try:
        return gguf, PROJECTORS[kind](ClipHeader(gguf))
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from None


def read_matching_mmproj(path: str | Path, network: Network) -> tuple[GGUF, MmprojConfig]:
    """Read an mmproj file of a language model; raises BadInput, one line."""
    clip, projector = read_mmproj(path)
    config, gguf, width = network.config, network.gguf, projector.encoder.out_width
    parts = f"{1 + config.n_deepstack_parts} times " if config.n_deepstack_parts else ""
    if width != config.dim * (1 + config.n_deepstack_parts):
        raise BadInput(
            f"{clip.path}: its rows have {width} numbers, and tokens of {gguf.path} {parts}"
            f"{config.dim}; an mmproj file of the same model was expected"
        )
    free = projector.encoder.free is not None
    if projector.whole != config.whole_pictures or free != config.uses_mrope:
        raise BadInput(
            f"{clip.path}: a projector {projector.kind}, which is not one of "
            f"{config.architecture}; an mmproj file of the same model was expected"
        )
    return clip, projector


def make_encode_function(device: str, clip: GGUF, projector: MmprojConfig) -> Encode:
    """Return what computes a projector's encoder on a device, or on the CPU beside it."""
    if device.split(":")[0] != "CPU":
        from orinllm.gpu.picture_encoder import FusedPictureEncoder, reason_not_fused

        if reason_not_fused(projector.encoder, device) is None:
            return FusedPictureEncoder(clip, projector.encoder, device)
    from orinllm.cpu.picture_encoder import CpuPictureEncoder

    return CpuPictureEncoder(clip, projector.encoder)


def network_for_pictures(network: Network, mmproj: str | Path | None) -> Network:
    """Return a network that has room for the pictures of an mmproj file; raises BadInput."""
    if mmproj is None:
        return network
    clip, projector = read_matching_mmproj(mmproj, network)

    def beside() -> int:
        return sum(encoder_weight_and_tile_bytes(clip, projector, network.context))

    return replace(network, pictures=projector.n_rows or 1, beside=beside)


def encoder_weight_and_tile_bytes(
    clip: GGUF, projector: MmprojConfig, context: int
) -> tuple[int, int]:
    """Return bytes of an encoder on a GPU: of weights, and for the largest picture of a context."""
    from orinllm.gpu.device import register_null_device
    from orinllm.gpu.picture_encoder import FusedPictureEncoder

    encode = FusedPictureEncoder(clip, projector.encoder, register_null_device(), empty=True)
    return encode.weight_and_tile_bytes(projector.most_embeddings_of_tile(context))


def projector_lines(mmproj: str | Path, network: Network) -> Iterator[str]:
    """Yield lines of a projector, and of the memory that its encoder takes; raises BadInput."""
    clip, projector = read_matching_mmproj(mmproj, network)
    encoder, shape = projector.encoder, projector.encoder.shape
    n, each = f"{projector.n_rows} rows a tile", f"tiles of {shape.size} x {shape.size} pixels"
    patches = f"{shape.patches_per_side**2} patches"
    if encoder.free is not None:
        n, patches = f"up to {projector.most_embeddings_of_tile(network.context):,} rows", "patches"
        each = f"a row each {encoder.block_side_pixels} x {encoder.block_side_pixels} pixels"
    yield f"pictures      {clip.path}: {projector.kind}, {n}"
    yield f"              {each}, {patches} of width {shape.width}"
    weights, rows = encoder_weight_and_tile_bytes(clip, projector, network.context)
    yield (
        f"              {clip.n_tensor_bytes / 1e6:,.1f} MB of weights; on a GPU "
        f"{weights / 1e6:,.1f} MB, and {rows / 1e6:,.1f} MB for the largest picture"
    )


def enable_pictures(
    template: ChatTemplate | None,
    mmproj: str | Path,
    network: Network,
    device: str,
    at_once: bool = False,
) -> None:
    """Let a model's chats have pictures; raises BadInput where it cannot chat.

    at_once: what the largest picture needs is taken now, and not with the first one.
    """
    if template is None:
        raise BadInput(
            f"{network.gguf.path}: has no chat template; pictures (--mmproj) are parts of messages"
        )
    encoder = PictureEncoder.read(mmproj, network, device)
    if at_once and (prepare := getattr(encoder.encode, "prepare_for_rows", None)) is not None:
        prepare(encoder.projector.most_embeddings_of_tile(network.context))
    template.enable_pictures(encoder)


def read_picture_bytes(path: str | Path) -> bytes:
    """Return the bytes of a picture's file; raises BadInput for one that cannot be read."""
    if not str(path):
        raise BadInput("the name of a picture's file is missing")
    path = Path(path)
    try:
        if not path.is_file():
            what = "is no regular file" if path.exists() else "no such file"
            raise BadInput(f"{path}: {what}; a picture was expected")
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}") from None
    if len(data) > MOST_BYTES:
        raise BadInput(f"{path}: is larger than {MOST_BYTES >> 20} MB")
    return data
