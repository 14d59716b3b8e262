"""Pictures of odd sizes and kinds, against `transformers`' own processors; and what is refused.

Only the tests that ask transformers import it: that takes seconds.
"""

import io
import math
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageOps
from tests.engine.vision import tiny, tiny_qwen

from orinllm.errors import BadInput
from orinllm.file.gguf import GGUF
from orinllm.mmproj import PictureEncoder, _shared_picture_process, read_mmproj, read_picture_bytes
from orinllm.network.layer import X
from orinllm.network.vision.encoder import AnyPictureSize, Encoder, EncoderShape
from orinllm.network.vision.idefics3 import _picture_text
from orinllm.network.vision.patches import normed_patches
from orinllm.network.vision.pictures import (
    PreparedPicture,
    end_between_pictures,
    find_or_make_picture,
    picture_rows_left_by_token,
    pictures_in,
    split_into_pieces,
)
from orinllm.network.vision.prepare import _size_by_longest_side, decode_picture, tiles_and_grid

TILE, LONGEST = 56, 168
MEAN, STD = (0.5, 0.4, 0.3), (0.5, 0.6, 0.7)
SIZES = [
    (1, 1),
    (1, 300),
    (257, 3),
    (56, 56),
    (70, 126),
    (57, 56),
    (168, 55),
    (169, 170),
    (640, 480),
]


def pictures() -> list[bytes]:
    """Files of every size and mode, some turned, animated or grey."""
    rng, found = np.random.default_rng(1), list[bytes]()

    def save(image: Image.Image, kind: str, **more: Any) -> None:
        file = io.BytesIO()
        image.save(file, kind, **more)
        found.append(file.getvalue())

    for width, height in SIZES:
        rgb = Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))
        turned = Image.Exif()
        turned[0x0112] = int(rng.integers(2, 9))
        save(rgb, "JPEG", exif=turned)
        save(rgb.convert("RGBA"), "PNG")
        save(rgb.quantize(16), "PNG", transparency=3)
        save(rgb.convert("CMYK"), "TIFF")
        deep = rng.integers(0, 1 << 16, (height, width), np.uint16)
        save(Image.fromarray(deep), "PNG")
    grey = Image.fromarray(rng.integers(0, 256, (40, 50), np.uint8))
    save(grey, "BMP")
    save(grey.convert("1"), "PNG")
    save(grey.convert("LA"), "WEBP", lossless=True)
    save(grey, "GIF", save_all=True, append_images=[grey.rotate(90)])
    return found


def encoder_of(size: int) -> Encoder:
    """An encoder that takes a tile as one patch."""
    return Encoder(
        EncoderShape(size, size, 1, 1, 1, 1, False, False), 1, 1e-6, MEAN, STD, (0,), (), (X,)
    )


def normed(tiles: list[Image.Image], size: int) -> np.ndarray:
    each = [normed_patches(encoder_of(size), np.asarray(tile)) for tile in tiles]
    return np.stack(each).reshape(-1, 3, size, size)


def test_tiles_are_those_of_transformers() -> None:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    size = {"height": TILE, "width": TILE}
    square = Gemma3ImageProcessorPil(size=size, image_mean=MEAN, image_std=STD)
    tiled: Any = Idefics3ImageProcessorPil(
        size={"longest_edge": LONGEST},
        max_image_size={"longest_edge": TILE},
        image_mean=MEAN,
        image_std=STD,
    )
    files = pictures()
    assert len(files) >= 40
    for at, data in enumerate(files):
        image, raw = decode_picture(data), ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
        wanted = square(images=[raw], return_tensors="np")["pixel_values"]
        tiles, _ = tiles_and_grid(image, "square", {"size": TILE})
        np.testing.assert_array_equal(normed(tiles, TILE), wanted)
        told = tiled(images=[[raw]], return_tensors="np", return_row_col_info=True)
        tiles, grid = tiles_and_grid(image, "tiled", {"size": TILE, "longest": LONGEST})
        np.testing.assert_array_equal(normed(tiles, TILE), told["pixel_values"][0], str(at))
        assert grid == (told["rows"][0][0], told["cols"][0][0])


def test_patches_of_blocks_are_those_of_transformers() -> None:
    """With limits that enlarge some pictures and make others smaller."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    patch, sizes = 14, {"cell": 28, "least": 6 * 28**2, "most": 60 * 28**2}
    processor = Qwen2VLImageProcessorPil(
        size={"shortest_edge": sizes["least"], "longest_edge": sizes["most"]},
        patch_size=patch,
        image_mean=MEAN,
        image_std=STD,
    )
    encoder = replace(encoder_of(patch), merge=2, free=AnyPictureSize())
    # The longest, one of `least` or `most` when it is rounded, one whose shorter side would be 0.
    more = []
    for size in ((400, 2), (85, 57), (285, 175), (11200, 56)):
        file = io.BytesIO()
        Image.new("RGB", size, (9, 90, 200)).save(file, "PNG")
        more.append(file.getvalue())
    for at, data in enumerate([*pictures(), *more]):
        image, raw = decode_picture(data), ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
        if max(image.size) > 200 * min(image.size):
            with pytest.raises(BadInput, match="a side of 200 times the other at most"):
                tiles_and_grid(image, "blocks", sizes)
            continue
        told = processor(images=[raw], return_tensors="np")
        (tile,), _ = tiles_and_grid(image, "blocks", sizes)
        assert [1, tile.height // patch, tile.width // patch] == list(told["image_grid_thw"][0])
        frames = told["pixel_values"].reshape(-1, 3, 2, patch**2)
        wanted = frames[:, :, 0].reshape(len(frames), -1)
        np.testing.assert_array_equal(normed_patches(encoder, np.asarray(tile)), wanted, str(at))


def test_a_longer_side_is_that_of_transformers() -> None:
    """Also where a file asks for more than 4,096 pixels."""
    from transformers.models.idefics3 import image_processing_pil_idefics3 as published

    for longest in (168, 1456, 4096, 4097, 5000, 9000):
        for width, height in (*SIZES, (300, 7), (7, 300), (1000, 999), (9999, 1)):
            image = np.broadcast_to(np.uint8(0), (3, height, width))
            wanted = published.get_resize_output_image_size(image, longest)
            assert _size_by_longest_side((width, height), longest) == wanted[::-1]


@pytest.mark.parametrize("grid", [(0, 0), (1, 2), (3, 2)])
def test_the_text_around_tiles_is_that_of_transformers(grid: tuple[int, int]) -> None:
    from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

    said = SimpleNamespace(
        fake_image_token="<fake_token_around_image>",
        global_image_tag="<global-img>",
        image_token="<image>",
        image_seq_len=1,
    )
    inputs = {"rows": [[grid[0]]], "cols": [[grid[1]]]}
    wanted = Idefics3Processor.replace_image_token(said, inputs, 0)  # type: ignore[arg-type]
    assert _picture_text(grid) == wanted


def png(width: int, height: int) -> bytes:
    """A file that says it is of a size, and has a row or two of it."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4) + name + data + zlib.crc32(name + data).to_bytes(4)

    head = width.to_bytes(4) + height.to_bytes(4) + bytes([8, 2, 0, 0, 0])
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def ico() -> bytes:
    """A picture that Pillow could read."""
    file = io.BytesIO()
    Image.new("RGB", (16, 16)).save(file, "ICO")
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (lambda: b"", "it is no picture"),
        (ico, "it is no picture: PNG, JPEG"),
        (lambda: png(40000, 40000), "has more than 50,000,000 pixels"),
        (lambda: png(9000, 9000), "9000 x 9000 pixels; 1 to 50,000,000"),
        (lambda: png(500, 500), "the picture is damaged"),
    ],
)
def test_what_is_no_picture_is_one_line(data: Callable[[], bytes], said: str) -> None:
    """In the process with limits, which goes on."""
    import base64

    job = {"data": base64.b64encode(data()).decode(), "way": "square", "sizes": {"size": 8}}
    with pytest.raises(BadInput, match=said):
        _shared_picture_process().run_job(job)


def seeing(path: Path, kind: str) -> PictureEncoder:
    """A projector whose encoder says nothing."""
    tiny.write_mmproj(path, kind)
    return PictureEncoder(*read_mmproj(path), lambda tiles: np.zeros((1, 1), np.float32))


NONE: list[tuple[Any, str]] = [
    (None, "a picture is NoneType of object"),
    ([[1], [2, 3]], "a picture is list of object"),
    (np.zeros((4, 4, 3), np.float32), r"ndarray of float32 \(4, 4, 3\); bytes of"),
    (np.zeros((4, 4, 2), np.uint8), r"ndarray of uint8 \(4, 4, 2\); bytes of"),
    (np.zeros((0, 4, 3), np.uint8), "the picture has 4 x 0 pixels"),
    (np.broadcast_to(np.uint8(7), (1 << 20, 1 << 20, 3)), "1048576 x 1048576 pixels; 1 to 50,000"),
    (Image.new("La", (3, 2)), "the picture is damaged: ValueError: conversion from La"),
]


def test_what_is_no_picture_of_a_program_is_one_line(tmp_path: Path) -> None:
    """Before an array is copied; an image of Pillow may be of a file that is not read yet."""
    encoder = seeing(tmp_path / "mmproj.gguf", "gemma3")
    file = io.BytesIO()
    Image.new("RGB", (9, 7)).save(file, "JPEG")
    assert encoder.prepare_picture(bytearray(file.getvalue())).n_rows == tiny.ROWS
    assert encoder.prepare_picture(Image.open(file)).n_rows == tiny.ROWS
    cut = Image.open(io.BytesIO(png(500, 500)))
    for source, said in (*NONE, (cut, "the picture is damaged: OSError: ")):
        with pytest.raises(BadInput, match=said) as raised:
            encoder.prepare_picture(source)
        assert "\n" not in str(raised.value)


def test_a_picture_of_more_rows_than_have_numbers_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers of the next picture begin there."""
    encoder, pixels = seeing(tmp_path / "mmproj.gguf", "idefics3"), np.zeros((32, 64, 3), np.uint8)
    monkeypatch.setattr("orinllm.mmproj.MOST_ROWS", 3 * tiny.ROWS)
    assert encoder.prepare_picture(pixels).n_rows == 3 * tiny.ROWS
    monkeypatch.setattr("orinllm.mmproj.MOST_ROWS", 3 * tiny.ROWS - 1)
    with pytest.raises(BadInput, match="the picture has 48 rows; 47 at most were expected"):
        encoder.prepare_picture(pixels)


def test_a_gemma_that_does_not_say_so_has_a_row_of_four_by_four_patches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As llama.cpp has it: `hparams.n_merge = 4` of PROJECTOR_TYPE_GEMMA3 (tools/mtmd/clip.cpp)."""
    added = gguf.GGUFWriter.add_uint32

    def add(self: gguf.GGUFWriter, key: str, value: int) -> None:
        if "scale_factor" not in key:
            added(self, key, value)

    monkeypatch.setattr(gguf.GGUFWriter, "add_uint32", add)
    assert seeing(tmp_path / "mmproj.gguf", "gemma3").projector.n_rows == (tiny.SIDE // 4) ** 2
    with pytest.raises(BadInput, match=r"clip.vision.projector.scale_factor is missing"):
        seeing(tmp_path / "mmproj.gguf", "idefics3")


def test_a_file_of_too_many_bytes_is_not_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, path = png(2, 2), tmp_path / "photo.png"
    path.write_bytes(data)
    encoder = seeing(tmp_path / "mmproj.gguf", "gemma3")
    assert read_picture_bytes(path) == data and encoder.prepare_picture(data).n_rows == tiny.ROWS
    monkeypatch.setattr("orinllm.mmproj.MOST_BYTES", len(data) - 1)
    with pytest.raises(BadInput, match=r"the picture has \d+ bytes; \d+ at most"):
        encoder.prepare_picture(data)
    with pytest.raises(BadInput, match=r"photo.png: is larger than"):
        read_picture_bytes(path)


def test_a_projector_that_is_not_supported_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "mmproj.gguf"
    tiny.write_mmproj(path, "gemma3")
    path.write_bytes(path.read_bytes().replace(b"gemma3", b"pixtrl"))
    with pytest.raises(
        BadInput, match=r"projector 'pixtrl' is not supported; .* gemma3, idefics3, qwen2vl"
    ):
        read_mmproj(path)
    tiny.write_text(path, "gemma3")
    with pytest.raises(BadInput, match="architecture is 'gemma3'; clip was expected"):
        read_mmproj(path)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_a_tensor_that_nobody_reads_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    """It is a variant's, which would be computed wrong; an encoder of sound beside is let be."""
    path = tmp_path / "mmproj.gguf"
    for name in ("v.pre_ln.weight", "mm.2.scale", "v.blk.0.attn_q_norm.weight", "a.blk.0.ln1.bias"):
        with pytest.MonkeyPatch.context() as patched:
            written = gguf.GGUFWriter.write_header_to_file

            def more(self: gguf.GGUFWriter, name: str = name, then: Any = written) -> None:
                self.add_tensor(name, np.ones(4, np.float32))
                then(self)

            patched.setattr(gguf.GGUFWriter, "write_header_to_file", more)
            tiny.write_mmproj(path, kind)
        if name.startswith("a."):
            assert read_mmproj(path)[1].kind
            continue
        with pytest.raises(BadInput, match=f"mmproj.gguf: tensor {name} is not part of this"):
            read_mmproj(path)


KEYS: list[tuple[str, object, str]] = [
    ("attention.layer_norm_epsilon", "x", "is 'x'; 1 numbers from 0"),
    ("attention.layer_norm_epsilon", math.inf, "is inf; 1 numbers from 0"),
    ("attention.layer_norm_epsilon", -1.0, "is -1.0; 1 numbers from 0"),
    ("image_mean", ["a", "b", "c"], "3 numbers from 0"),
    ("image_mean", [1.0, 2.0], "3 numbers from 0"),
    ("image_std", [1.0, math.nan, 1.0], "3 numbers from 0"),
    ("image_std", [1.0, 0.0, 1.0], "numbers above 0 were expected"),
    ("block_count", 1 << 16, "is 65536; a number from 1 to [0-9]+ was expected"),
    ("image_size", 1 << 16, "v.position_embd.weight has the shape .*; [0-9,]{11} rows or more"),
    ("attention.head_count", 5, "sizes that do not fit each other"),
    ("patch_size", 1 << 10, "sizes that do not fit each other"),
    ("projector.scale_factor", 3, "a divisor of [0-9]+ patches a side was expected"),
    ("clip.use_silu", True, "clip.use_silu is true; .* was expected with GELU"),
]


@pytest.mark.parametrize("kind", ["gemma3", "idefics3"])
@pytest.mark.parametrize(("key", "value", "said"), KEYS)
def test_a_key_that_lies_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, key: str, value: object, said: str
) -> None:
    """Before anything of its size is made."""
    tiny.write_mmproj(tmp_path / "mmproj.gguf", kind)
    clip = GGUF.open(tmp_path / "mmproj.gguf")
    name = key if key.startswith("clip.") else f"clip.vision.{key}"
    clip.metadata = {**clip.metadata, name: value}  # type: ignore[assignment]
    monkeypatch.setattr(GGUF, "open", lambda path: clip)
    with pytest.raises(BadInput, match=f"mmproj.gguf: .*{said}"):
        read_mmproj(tmp_path / "mmproj.gguf")


@pytest.mark.parametrize("kind", tiny.QWENS)
def test_sizes_of_a_qwen_that_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A quarter of a head turns by a row and one by a column; a picture has a row at least."""
    tiny.write_mmproj(tmp_path / "mmproj.gguf", kind)
    clip = GGUF.open(tmp_path / "mmproj.gguf")
    monkeypatch.setattr(GGUF, "open", lambda path: clip)
    metadata: dict[str, Any] = {**clip.metadata, "clip.vision.image_max_pixels": 1}
    clip.metadata = metadata  # type: ignore[assignment]
    assert read_mmproj(tmp_path / "mmproj.gguf")[1].most_embeddings_of_tile(256) == 1
    metadata["clip.vision.attention.head_count"] = tiny_qwen.WIDTH // 6
    with pytest.raises(BadInput, match="whose quarters are whole were expected"):
        read_mmproj(tmp_path / "mmproj.gguf")


def test_a_tensor_of_another_type_or_of_one_dimension_is_one_line(tmp_path: Path) -> None:
    path, added = tmp_path / "mmproj.gguf", gguf.GGUFWriter.add_tensor
    for name, change, said in (
        ("v.post_ln.bias", lambda v: v.astype(np.int32), "v.post_ln.bias has the type I32"),
        ("v.position_embd.weight", np.ravel, r"v.position_embd.weight has the shape \("),
        ("v.position_embd.weight", lambda v: v[:, :-1], "v.position_embd.weight has the shape"),
        ("mm.input_projection.weight", np.ravel, r"mm.input_projection.weight has the shape \("),
    ):

        def add(self: gguf.GGUFWriter, at: str, values: Any, of: Any = (name, change)) -> None:
            added(self, at, of[1](values) if at == of[0] else values)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(gguf.GGUFWriter, "add_tensor", add)
            tiny.write_mmproj(path, "gemma3")
        with pytest.raises(BadInput, match=f"mmproj.gguf: tensor {said}"):
            read_mmproj(path)


def nothing(given: object) -> NDArray[np.float32]:
    raise AssertionError


def test_another_file_of_the_same_path_makes_its_own_rows(tmp_path: Path) -> None:
    tiny.write_mmproj(tmp_path / "mmproj.gguf", "gemma3")
    found = read_mmproj(tmp_path / "mmproj.gguf")

    def rows(value: float) -> NDArray[np.float32]:
        encoder = PictureEncoder(*found, lambda tiles: np.full((tiny.ROWS, 1), value, np.float32))
        return encoder.prepare_picture(np.zeros((8, 8, 3), np.uint8)).encoded_rows

    assert rows(1).max() == 1 and rows(2).max() == 2
    tiles = [np.zeros(shape, np.uint8) for shape in ((2, 4, 3), (4, 2, 3), (2, 4, 3))]
    wide, tall, again = (find_or_make_picture("", PreparedPicture((t,)), 2, nothing) for t in tiles)
    assert wide is again and wide is not tall  # of the same bytes
    grids = [
        find_or_make_picture("", PreparedPicture((tiles[0],) * 3, grid), 3, nothing)
        for grid in ((1, 2), (2, 1))
    ]
    assert [picture.grid for picture in grids] == [(1, 2), (2, 1)]


def test_rows_are_as_many_as_places_for_them(tmp_path: Path) -> None:
    """A template may leave a picture out, or write its token for another reason."""
    encoder = seeing(tmp_path / "mmproj.gguf", "idefics3")
    picture = find_or_make_picture(
        "", PreparedPicture((np.zeros((8, 8, 3), np.uint8),) * 3, (1, 2)), 6, nothing
    )
    a, b, c, d, e, f = picture.ids
    assert encoder.insert_picture_rows([5, 9, 6, 9, 9], 9, [picture]) == [5, a, b, 6, c, d, e, f]
    for ids in ([5, 9, 9], [9] * 4):
        with pytest.raises(BadInput, match=f"has {ids.count(9)} places for 3 tiles of pictures"):
            encoder.insert_picture_rows(ids, 9, [picture])


def test_pictures_that_nobody_has_are_kept_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many bytes of them, and the last one whatever it takes."""
    monkeypatch.setattr("orinllm.network.vision.pictures._KEPT_BYTES", 100)

    def seen(side: int, shade: int) -> range:
        tile = np.full((side, side, 3), shade, np.uint8)
        return find_or_make_picture("kept", PreparedPicture((tile,)), 1, nothing).ids

    first, second = seen(4, 1), seen(4, 2)  # of 48 bytes each
    assert seen(4, 1) == first
    third = seen(4, 3)
    assert len(pictures_in([*first, *third])) == 2
    with pytest.raises(BadInput, match="a picture that is not there any more"):
        pictures_in([*first, *second])
    large = seen(40, 4)
    assert len(pictures_in(large)) == 1
    with pytest.raises(BadInput, match="a picture that is not there any more"):
        pictures_in(third)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_what_stands_for_a_picture_in_a_template_that_knows_none(tmp_path: Path, kind: str) -> None:
    """As the models' own processors write it around rows."""
    tiny.write_mmproj(tmp_path / "mmproj.gguf", kind)
    clip, projector = read_mmproj(tmp_path / "mmproj.gguf")

    picture = find_or_make_picture(
        "", PreparedPicture((np.zeros((8, 8, 3), np.uint8),), (0, 0)), 1, nothing
    )
    said = PictureEncoder(clip, projector, nothing).prompt_text(picture, bare=True)
    wanted = {
        "gemma3": "\n\n<start_of_image><end_of_image>\n\n",
        "idefics3": "<fake_token_around_image><global-img><image><fake_token_around_image>",
    }
    assert said == wanted.get(kind, "<|vision_start|><|image_pad|><|vision_end|>")


def test_pieces_cut_no_picture() -> None:
    """Two pictures that touch, of three rows and five, in text."""
    first, second = (
        range(-(5 << 20) - 1, -(5 << 20) - 4, -1),
        range(-(9 << 20) - 1, -(9 << 20) - 6, -1),
    )
    ids = [1, 2, *first, *second, 3, 4, 5]
    assert picture_rows_left_by_token(ids) == [0, 0, 2, 1, 0, 4, 3, 2, 1, 0, 0, 0, 0]
    for start in range(len(ids)):
        for most in range(1, 7):
            found = list(split_into_pieces(ids, start, len(ids), most, whole=True))
            assert [at for at, _ in found] == [start, *(to for _, to in found[:-1])]
            assert all(to in (1, 2, 5, 10, 11, 12, 13) for _, to in found)
            assert all(to - at <= max(most, 5) for at, to in found)
    assert (
        end_between_pictures(ids, 0, 4) == 2
        and end_between_pictures(ids, 2, 4) == 5
        and end_between_pictures(ids, 3, 4) == 5
    )
