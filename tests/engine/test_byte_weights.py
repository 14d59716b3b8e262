"""Weights as bytes and scales, of every type, against `gguf`'s own dequantization."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize

from orinllm.byte_weights import LAYOUTS, write_rows

ROWS, COLS = 5, 512
# Where the 16-bit floats of a block lie; 16 bits drawn at random could be no number.
HALVES = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "MXFP4": (),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
}


@pytest.mark.parametrize("type_", sorted(LAYOUTS), ids=lambda type_: type_.name)
def test_every_type_is_exact(type_: GGMLQuantizationType) -> None:
    values, size = GGML_QUANT_SIZES[type_]
    draws = np.random.default_rng(7)
    blocks = draws.integers(0, 256, (ROWS * COLS // values, size), np.uint8)
    for at in HALVES.get(type_.name, (0,)):
        halves = draws.normal(size=(len(blocks), 1)).astype(np.float16)
        blocks[:, at : at + 2] = halves.view(np.uint8)
    if type_.name == "MXFP4":
        blocks[:, 0] = draws.integers(0, 200, len(blocks))
    packed, layout = blocks.reshape(ROWS, -1), LAYOUTS[type_]
    out = np.zeros((ROWS, layout.row_bytes(COLS)), np.uint8)
    write_rows(packed, type_, out)
    kinds = 2 if layout.minima else 1
    floats = np.ascontiguousarray(out[:, COLS:]).view(np.float32).reshape(ROWS, kinds, -1, 1)
    got = out[:, :COLS].view(np.int8).reshape(ROWS, -1, layout.group) * floats[:, 0]
    if layout.minima:
        got += floats[:, 1]
    np.testing.assert_array_equal(got.reshape(ROWS, COLS), dequantize(packed, type_))
