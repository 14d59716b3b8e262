"""Qwen3.5 with a picture, against what llama.cpp's mtmd makes of the same files.

The numbers are first logits behind mtmd_helper_eval_chunks (llama.cpp of llama_cpp_python 0.3.36,
without flash attention), of a picture that needs no resizing between two texts.
"""

from pathlib import Path

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray
from tests.engine.network import hybrid_models
from tests.engine.vision import tiny, tiny_qwen

from orinllm.choose.sampling import Sampling
from orinllm.model import Model

# "a look ", a picture between its two marks, and " what is it".
BEFORE, AFTER = (
    [97, 32, 108, 111, 111, 107, 32, 256],
    [257, 32, 119, 104, 97, 116, 32, 105, 115, 32, 105, 116],
)
# By file: the token that comes first, and the logits of every 32nd one.
SAID: dict[str, tuple[int, list[float]]] = {
    "qwen35": (
        216,
        [-1.9181, -0.4818, 0.7252, 1.3068, -0.5435, 1.3163, -0.4653, -0.1374, 0.0378, 0.3706],
    ),
    "qwen35moe": (
        272,
        [1.7525, 0.4974, 1.0293, 1.5472, -0.6995, 1.1318, -1.9701, -0.0968, 0.5297, -0.5167],
    ),
}


def write(folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a model with the sections and the tokens of one that sees, and its projector."""
    head, rng = gguf.GGUFWriter.write_header_to_file, np.random.default_rng(5)

    def with_tokens(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_dimension_sections([2, 1, 1, 0])
        tiny._write_vocabulary(writer, "qwen3vl")
        head(writer)

    def draw(*shape: int, around: float = 0.0, by: float | None = None) -> NDArray[np.float32]:
        spread = shape[-1] ** -0.5 if by is None else by
        return rng.normal(around, spread, shape).astype(np.float16).astype(np.float32)

    with monkeypatch.context() as patched:
        patched.setattr(hybrid_models, "VOCAB", len(tiny.tokens("qwen3vl")))
        patched.setattr(gguf.GGUFWriter, "write_header_to_file", with_tokens)
        hybrid_models.write(folder / "model.gguf", kind)
    vision = tiny_qwen.weights("qwen3vl", hybrid_models.DIM, draw)
    plain = {name: values for name, values in vision.items() if "deepstack" not in name}
    monkeypatch.setattr(tiny_qwen, "DEEPSTACK_AT", ())
    tiny_qwen.write(folder / "mmproj.gguf", "qwen3vl", plain, old_names=False)


@pytest.mark.parametrize("kind", SAID)
def test_first_logits_are_those_of_llama_cpp(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, kind, monkeypatch)
    model = Model.load(tmp_path / "model.gguf", device="CPU", mmproj=tmp_path / "mmproj.gguf")
    assert model.template is not None and model.template.picture_encoder is not None
    pixels = np.random.default_rng(9).integers(0, 256, (128, 192, 3), np.uint8)
    picture = model.template.picture_encoder.prepare_picture(pixels)
    ids = [*BEFORE, *picture.ids, *AFTER]
    first, wanted = SAID[kind]
    answer = model.generate(ids, Sampling(temperature=0), max_tokens=1)
    assert [piece.token for piece in answer][:1] == [first]
    assert np.abs(model.runner.last_logits()[0][::32] - wanted).max() < 0.003
