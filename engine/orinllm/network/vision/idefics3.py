"""Idefics 3 and SmolVLM: SigLIP on tiles of a picture, and on all of it as a thumbnail.

Source: tools/mtmd/{clip.cpp,models/siglip.cpp} of llama.cpp; tiles, positions and the text around
them are those of `transformers`' Idefics3Processor.
"""

import numpy as np

from orinllm.network.vision.encoder import JoinRows, MatrixProduct, MmprojConfig, layers_operations
from orinllm.network.vision.header import ClipHeader

_AROUND, _GLOBAL, _SLOT = "<fake_token_around_image>", "<global-img>", "<image>"


def idefics3_mmproj(header: ClipHeader) -> MmprojConfig:
    """Return the config of an Idefics 3 or a SmolVLM."""
    shape, side = header.square_tile_shape_and_merge()
    out = header.tensor_shape("mm.model.fc.weight")[0]
    operations = [
        *layers_operations(shape),
        JoinRows("joined", "seen", side**2),
        MatrixProduct("rows", "joined", (("mm.model.fc", out),)),
    ]
    return MmprojConfig(
        kind="idefics3",
        encoder=header.make_encoder(
            shape, side, _patch_positions(shape.patches_per_side), operations
        ),
        way="tiled",
        sizes={
            "size": shape.size,
            "longest": header.positive_whole_number("preproc_image_size", shape.size),
        },
        n_rows=(shape.patches_per_side // side) ** 2,
        slot=_SLOT,
        kept=False,
        text=_picture_text,
    )


def _patch_positions(side: int) -> list[int]:
    """Return the position of each patch: its place in the tile, as a fraction in single floats.

    Where the fraction is rounded down, two neighbours have one position, as they had in training.
    """
    step = np.float32(1) / np.float32(side)
    borders = np.arange(1 / side, 1.0, 1 / side, dtype=np.float64).astype(np.float32)
    places = np.arange(side, dtype=np.float32) * step
    buckets = np.searchsorted(borders, places, side="right")
    return [int(row * side + column) for row in buckets for column in buckets]


def _picture_text(grid: tuple[int, int]) -> str:
    rows, columns = grid
    whole = f"{_AROUND}{_GLOBAL}{_SLOT}{_AROUND}"
    if (rows, columns) == (0, 0):
        return whole
    lines = (
        "".join(f"{_AROUND}<row_{row}_col_{column}>{_SLOT}" for column in range(1, columns + 1))
        for row in range(1, rows + 1)
    )
    return "".join(f"{line}\n" for line in lines) + f"\n{whole}"
