"""The encoders' own kernels, emulated: against `transformers`, and attention against float64."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from PIL import Image
from tests.engine.gpu.kernels.emulated_buffers import Array, buffer, read
from tests.engine.vision import tiny, tiny_qwen

from orinbench.check.reference_vision import VisionReference
from orinllm.cpu.picture_encoder import CpuPictureEncoder
from orinllm.gpu.device import register_null_device
from orinllm.gpu.kernels.picture_encoder import (
    BLOCK_ROWS,
    PaddedHeads,
    range_attention_launch,
    split_heads_launch,
)
from orinllm.gpu.launch import LaunchGraph
from orinllm.gpu.picture_encoder import FusedPictureEncoder, reason_not_fused
from orinllm.mmproj import make_encode_function, read_mmproj
from orinllm.network.vision.patches import query_blocks_with_keys
from orinllm.network.vision.prepare import tiles_and_grid

pytestmark = pytest.mark.usefixtures("emulation")
RECORDED = np.load(Path(__file__).with_name("recorded.npz"))


ADD = gguf.GGUFWriter.add_tensor


def quantized(writer: gguf.GGUFWriter, name: str, values: Array, **more: Any) -> None:
    """Add a tensor to a file, a matrix of halves as Q8_0."""
    if values.ndim == 2 and values.dtype == np.float16:
        kind = gguf.GGMLQuantizationType.Q8_0
        ADD(writer, name, gguf.quants.quantize(values.astype(np.float32), kind), raw_dtype=kind)
    else:
        ADD(writer, name, values, **more)


@pytest.mark.parametrize("kind", ["gemma3", "qwen25vl", "qwen3vl"])
def test_rows_are_those_of_transformers(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In two shapes, the larger one last; and the first one once more, in the larger's room.

    Where the record has none, the float64 reference judges: Q8_0 matrices, and an epsilon of norms
    that counts.
    """
    if other := kind == "qwen3vl":
        for name, value in {"EPS": 0.5, "WIDTH": 128, "HEADS": 2, "HIDDEN": 128}.items():
            monkeypatch.setattr(tiny_qwen, name, value)
        monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", quantized)
    tiny.write_mmproj(tmp_path / "mmproj.gguf", kind)
    clip, projector = read_mmproj(tmp_path / "mmproj.gguf")
    encode = make_encode_function("EMU", clip, projector)
    assert isinstance(encode, FusedPictureEncoder)
    pictures = [Image.fromarray(picture) for picture in tiny.pictures(kind)]
    tiles = [
        np.asarray(tile)
        for picture in pictures
        for tile in tiles_and_grid(picture, projector.way, projector.sizes)[0]
    ]
    wanted, n = RECORDED[f"{kind}.rows"], tiny.rows(kind)[0]
    if other:
        reference = VisionReference(tmp_path / "mmproj.gguf")
        exact = np.concatenate([reference.encode_tile(tile) for tile in tiles])
        wanted = exact
    first, rows = encode(tiles[1:]), encode(tiles)
    assert np.abs(rows - wanted).max() < 0.003
    assert (first == rows[n:]).all()
    for launches in encode._lists.values():  # a board's host reads no others
        assert all(value.buffer.options is None for value in launches._results)
    n_rows = projector.most_embeddings_of_tile(1 << 20)
    weights, most = FusedPictureEncoder(
        clip, projector.encoder, register_null_device(), empty=True
    ).weight_and_tile_bytes(n_rows)
    assert weights == encode._weights.n_bytes
    encode.prepare_for_rows(n_rows)
    room = encode._room
    assert (encode(tiles) == rows).all() and encode._room is room
    each = [launch for of in encode._lists.values() for launch in of.launches]
    bases = {id(a.buffer.base): a.buffer.base for one in each for a in one.arguments}
    held = sum(base.nbytes for base in bases.values()) - weights
    assert room.n_bytes < held <= most < 1.5 * held


@pytest.mark.parametrize(("head", "turned"), [(64, True), (72, False), (80, True)])
def test_attention_of_ranges(head: int, turned: bool, rng: np.random.Generator) -> None:
    """A window of 70 rows, one of a single row, and one of 64."""
    heads, n = 2, 135
    windows = [slice(0, 70), slice(70, 71), slice(71, n)]
    what = PaddedHeads(
        heads, head, part=heads * head + 64, stride=3 * heads * head + 192, out_stride=256
    )
    qkv = rng.standard_normal((n, what.stride)).astype(np.float32)
    q, k, v = (
        qkv[:, at : at + heads * head].reshape(n, heads, head).astype(np.float64)
        for at in (0, what.part, 2 * what.part)
    )
    angles = rng.standard_normal((n, head // 2)) if turned else np.zeros((n, head // 2))
    turns = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    q, k = (_turned(x, turns.astype(np.float64)) for x in (q, k))
    ranges = query_blocks_with_keys(windows, BLOCK_ROWS)
    assert ranges.tolist() == [[0, 64, 0, 70], [64, 70, 0, 70], [70, 71, 70, 71], [71, n, 71, n]]
    size = n * heads * what.padded_head_dim
    first, second, third = (buffer(np.full(size, np.nan, np.float16)) for _ in range(3))
    before = rng.standard_normal((n, 256)).astype(np.float16)
    out, given = buffer(before), buffer(turns) if turned else None
    launches = [
        split_heads_launch((first, second, third), buffer(qkv), given, what, n),
        range_attention_launch(
            out, (first, second, third), buffer(ranges.astype(np.int32)), what, len(ranges)
        ),
    ]
    LaunchGraph("EMU", launches).start()
    got = read(out, np.float16).reshape(n, 256)
    assert (got[:, heads * head :] == before[:, heads * head :]).all()
    found = got[:, : heads * head].reshape(n, heads, head).astype(np.float64)
    for rows in windows:
        for at in range(heads):
            wanted = _attended(q[rows, at], k[rows, at], v[rows, at])
            assert np.abs(found[rows, at] - wanted).max() < 0.004


def _turned(x: Array, turns: Array) -> Array:
    cos, sin = (part[:, None] for part in np.split(turns, 2, axis=1))
    a, b = np.split(x, 2, axis=2)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=2)


def _attended(q: Array, k: Array, v: Array) -> Array:
    scores = np.exp(q @ k.T * q.shape[1] ** -0.5)
    found: Array = scores @ v / scores.sum(axis=1, keepdims=True)
    return found


def test_what_the_kernels_do_not_compute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "VISION_HEADS", 4)
    tiny.write_mmproj(tmp_path / "mmproj.gguf", "gemma3")
    clip, projector = read_mmproj(tmp_path / "mmproj.gguf")
    assert isinstance(make_encode_function("EMU", clip, projector), CpuPictureEncoder)
    assert reason_not_fused(projector.encoder, "EMU") == (
        "heads of 12 elements; multiples of 8 up to 256 have kernels"
    )
    assert reason_not_fused(projector.encoder, "CPU") == "CPU is neither CUDA nor NV"
