"""The float64 reference of encoders, and the gate that judges by it.

`transformers` judges the reference (recorded.npz), and the reference the encoders, in sizes that
the record has not.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.engine.vision import tiny, tiny_qwen

from orinbench.check.reference_vision import VisionReference
from orinbench.check.vision import Encode, Pixels, judge_encoder
from orinbench.errors import BenchError
from orinllm.mmproj import make_encode_function, read_mmproj
from orinllm.network.vision.pictures import Floats
from orinllm.network.vision.prepare import tiles_and_grid

RECORDED = np.load(Path(__file__).with_name("recorded.npz"))


@pytest.fixture(scope="module", params=tiny.KINDS)
def mmproj(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reference") / f"{request.param}.gguf"
    tiny.write_mmproj(path, request.param)
    return path


def test_the_reference_is_what_transformers_computes(mmproj: Path) -> None:
    kind, reference = mmproj.stem, VisionReference(mmproj)
    _, projector = read_mmproj(mmproj)
    pictures = [Image.fromarray(picture) for picture in tiny.pictures(kind)]
    tiles = [t for p in pictures for t in tiles_and_grid(p, projector.way, projector.sizes)[0]]
    rows = np.concatenate([reference.encode_tile(np.asarray(tile)) for tile in tiles])
    assert np.abs(rows - RECORDED[f"{kind}.rows"]).max() < 1e-5


def test_the_gate_passes_an_encoder_in_other_sizes(mmproj: Path) -> None:
    encode = make_encode_function("CPU", *read_mmproj(mmproj))
    seen = judge_encoder("tinygrad:CPU", mmproj, encode, 1)
    assert seen.passed and seen.allowed < 1e-5, seen


def test_the_gate_fails_small_errors(tmp_path: Path) -> None:
    """A row of a hundred parts off, all a thousandth off, a row too few, and no numbers.

    Halves are let be where single floats are not.
    """
    path = tmp_path / "idefics3.gguf"
    tiny.write_mmproj(path, "idefics3")
    encode = make_encode_function("CPU", *read_mmproj(path))

    def one_row(tiles: Sequence[Pixels]) -> Floats:
        rows = encode(tiles)
        rows[3] *= np.float32(1.02)
        return rows

    wrongs: tuple[Encode, ...] = (
        one_row,
        lambda tiles: encode(tiles) * np.float32(1.001),
        lambda tiles: encode(tiles)[1:],
        lambda tiles: encode(tiles) * np.float32(np.nan),
    )
    for wrong in wrongs:
        assert not judge_encoder("tinygrad:CPU", path, wrong, 1).passed
    assert not judge_encoder("tinygrad:NV", path, one_row, 1).passed
    halves = judge_encoder(
        "tinygrad:NV", path, lambda t: encode(t).astype(np.float16).astype(np.float32), 2
    )
    assert halves.passed and 1e-4 < halves.allowed < 0.01, halves


def test_a_projector_that_the_reference_does_not_know(tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    tiny.write_mmproj(path, "gemma3")
    path.write_bytes(path.read_bytes().replace(b"gemma3", b"pixtrl"))
    with pytest.raises(BenchError, match="knows no projector 'pixtrl'"):
        VisionReference(path)


@pytest.mark.parametrize("kind", ["gemma3", "qwen25vl", "qwen3vl"])
def test_the_epsilon_of_norms_counts(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that files have, 1e-6, changes nothing that a gate sees.

    And windows of 7 patches, of which 6 are whole blocks; and a Qwen3-VL that does not say GELU.
    """
    monkeypatch.setattr(tiny, "VISION_EPS", 0.5)
    monkeypatch.setattr(tiny_qwen, "EPS", 0.5)
    monkeypatch.setitem(tiny_qwen.PATCH, "qwen25vl", 16)
    path = tmp_path / "mmproj.gguf"
    tiny.write_mmproj(path, kind)
    if kind == "qwen3vl":
        path.write_bytes(path.read_bytes().replace(b"clip.use_gelu", b"clip.use_else"))
    seen = judge_encoder("tinygrad:CPU", path, make_encode_function("CPU", *read_mmproj(path)), 1)
    assert seen.passed, seen


def test_least_and_most_pixels_of_a_file_that_says_none(tmp_path: Path) -> None:
    """The least are those of the models' processors: size["shortest_edge"] of `transformers`.

    56 x 56 in Qwen2VLImageProcessor, 65,536 in Qwen3-VL's preprocessor_config.json.
    """
    for kind, least, cell in (("qwen25vl", 56 * 56, 28), ("qwen3vl", 65_536, 32)):
        path = tmp_path / f"{kind}.gguf"
        tiny.write_mmproj(path, kind)
        data = path.read_bytes()
        for key in (b"image_min_pixels", b"image_max_pixels"):
            data = data.replace(key, key.replace(b"image", b"other"))
        path.write_bytes(data)
        _, projector = read_mmproj(path)
        assert projector.sizes == {"cell": cell, "least": least, "most": 4096 * cell**2}
