import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter
from tests.benchmarks.check import transformers_golden
from tests.benchmarks.check.llama_cpp_golden import CASES, GOLDEN, N_TOKENS, prompt
from tests.benchmarks.gguf_files import write_family, write_sparse
from tests.benchmarks.orinbench_command import Patch

from orinbench.check import reference as reference_module
from orinbench.check.reference import Reference, log_softmax
from orinbench.check.reference_rope import Array
from orinbench.errors import BenchError
from orinbench.model import open_model
from orinbench.synth import write_synthetic
from orinbench.synth.shapes import SHAPES

PROMPT = [7, 300, 41, 41, 150, 2, 99, 260, 31, 8, 77, 120, 5, 64, 201, 18]
# Log-probabilities after PROMPT of the five likeliest and the three unlikeliest tokens, by
# llama-server of llama.cpp 0.5.0 (0c1e570), CPU, `-ctk f32 -ctv f32 -fa off`, 2026-11-21, on what
# write_family writes for these arguments. It rounds activations to F16 for F16 weights.
LLAMA_CPP: dict[str, tuple[dict[str, Any], dict[int, float]]] = {
    "llama": (
        {"architecture": "llama"},
        {50: -3.4182, 264: -4.0607, 262: -4.2013, 216: -4.2287, 16: -4.2325}
        | {15: -8.9425, 117: -9.1785, 75: -9.2349},
    ),
    "a head of its own": (
        {"architecture": "llama", "tied": False},
        {279: -3.6119, 88: -3.622, 41: -3.6698, 128: -3.8127, 272: -3.9227}
        | {34: -8.8806, 157: -9.0989, 143: -9.3125},
    ),
    "llama 3.1's rope_freqs": (
        {"architecture": "llama", "rope_freqs": True},
        {24: -3.601, 50: -3.6079, 264: -3.8996, 183: -3.9798, 286: -4.0709}
        | {15: -8.9617, 75: -9.0982, 117: -9.6892},
    ),
    "qwen2's biases": (
        {"architecture": "qwen2", "bias": True},
        {69: -3.146, 18: -3.619, 203: -3.7398, 306: -4.1019, 164: -4.2689}
        | {49: -8.7758, 287: -8.7938, 170: -9.8564},
    ),
    "qwen3's norms and wider heads": (
        {"architecture": "qwen3", "qk_norm": True, "head_dim": 64},
        {11: -3.4857, 43: -3.5623, 40: -3.6945, 123: -4.0939, 141: -4.1151}
        | {98: -8.338, 196: -8.6587, 306: -9.0477},
    ),
}

Models = Callable[[str], Path]  # the file of a shape


def error_against_llama_cpp(path: Path, expected: dict[int, float]) -> float:
    got = log_softmax(Reference(open_model(path)).logits(PROMPT))[0]
    return max(abs(float(got[token]) - value) for token, value in expected.items())


@pytest.mark.parametrize("family", LLAMA_CPP)
def test_it_agrees_with_llama_cpp(tmp_path: Path, family: str) -> None:
    arguments, expected = LLAMA_CPP[family]
    path = write_family(tmp_path / "m.gguf", **arguments)
    assert error_against_llama_cpp(path, expected) < 4e-3


@pytest.mark.parametrize("family", LLAMA_CPP)
def test_with_the_other_rotation_it_does_not_agree(
    tmp_path: Path, monkeypatch: Patch, family: str
) -> None:
    arguments, expected = LLAMA_CPP[family]
    other = {name: not turns for name, turns in reference_module._NEIGHBOUR_ROPE.items()}
    monkeypatch.setattr(reference_module, "_NEIGHBOUR_ROPE", other)
    path = write_family(tmp_path / "m.gguf", **arguments)
    assert error_against_llama_cpp(path, expected) > 0.1


@pytest.fixture(scope="module")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("tiny")

    def path_of(shape: str) -> Path:
        path = folder / f"{shape}.gguf"
        if not path.exists():
            write_synthetic(path, shape, "F32", 0)
        return path

    return path_of


@pytest.fixture(scope="module")
def unchanged() -> dict[str, Array]:
    """Logits of each shape as it is, once they have been asked for."""
    return {}


def error_of(path: Path, case: str, context: int, file: Path = GOLDEN) -> float:
    """The largest error of a log-probability that a golden file has: llama.cpp's by default."""
    got = log_softmax(Reference(open_model(path), context=context).logits(prompt(), N_TOKENS))
    golden = json.loads(file.read_text())[case]
    errors: list[float] = [
        abs(float(got[int(position), int(token)]) - value)
        for position, tokens in golden.items()
        for token, value in tokens.items()
    ]
    return max(errors)


@pytest.mark.parametrize("shape", transformers_golden.CASES)
def test_it_agrees_with_transformers(tiny_models: Models, shape: str) -> None:
    """Both in float64, so that what is left is the six digits of the file."""
    file, context = transformers_golden.GOLDEN, transformers_golden.CONTEXT
    assert error_of(tiny_models(shape), shape, context, file) < 2e-6


@pytest.mark.parametrize(
    ("shape", "context"), [(shape, context) for shape in CASES for context in CASES[shape]]
)
def test_every_architecture_agrees_with_llama_cpp(
    tiny_models: Models, shape: str, context: int
) -> None:
    # llama.cpp looks gelu up in a table of 16-bit floats: 8e-4 here for gemma3.
    bound = 3e-3 if shape == "tiny-gemma3" else 3e-5
    assert error_of(tiny_models(shape), f"{shape} {context}", context) < bound


@pytest.mark.parametrize(
    ("shape", "key", "value"),
    [
        ("tiny-gemma3", "gemma3.attention.sliding_window", 25),
        ("tiny-gemma3", "gemma3.attention.sliding_window", 0),
        ("tiny-gemma3", "gemma3.rope.freq_base_swa", 1e6),
        ("tiny-gemma3", "gemma3.rope.scaling.factor", 1.0),
        ("tiny-gemma3", "gemma3.attention.sliding_window_pattern", 5),
        ("tiny-gptoss", "gpt-oss.attention.sliding_window", 23),
        ("tiny-gptoss", "gpt-oss.rope.scaling.type", "linear"),
        ("tiny-gptoss", "gpt-oss.expert_used_count", 2),
        ("tiny-yarn", "qwen2.rope.scaling.original_context_length", 128),
        ("tiny-yarn", "qwen2.rope.scaling.type", "none"),
        ("tiny-granite", "granite.attention.scale", 0.06),
        ("tiny-granite", "granite.embedding_scale", 5.0),
        ("tiny-granite", "granite.residual_scale", 0.6),
        ("tiny-granite", "granite.logit_scale", 3.0),
        ("tiny-granite", "granite.rope.scaling.finetuned", False),
        ("tiny-phi3", "phi3.rope.dimension_count", 64),
        ("tiny-phi3", "phi3.rope.scaling.attn_factor", 1.0),
        ("tiny-qwen3moe", "qwen3moe.expert_used_count", 3),
        ("tiny-mixtral", "llama.expert_weights_scale", 1.5),
    ],
)
def test_every_key_matters(
    tiny_models: Models, unchanged: dict[str, Array], shape: str, key: str, value: Any
) -> None:
    model = open_model(tiny_models(shape))
    tensors = {name: info for name, info in model.tensors.items() if "rope_factors" not in name}
    changed = Reference(
        replace(model, metadata={**model.metadata, key: value}, tensors=tensors), context=512
    )
    if shape not in unchanged:
        plain = Reference(replace(model, tensors=tensors), context=512)
        unchanged[shape] = log_softmax(plain.logits(prompt(), N_TOKENS))
    got = log_softmax(changed.logits(prompt(), N_TOKENS))
    assert np.abs(unchanged[shape] - got).max() > 0.01


def test_a_soft_cap_bounds_the_logits(tiny_models: Models) -> None:
    model = open_model(tiny_models("tiny-gemma3"))
    plain = Reference(model).logits(prompt())
    key = {"gemma3.final_logit_softcapping": 5.0}
    capped = Reference(replace(model, metadata={**model.metadata, **key})).logits(prompt())
    np.testing.assert_allclose(capped, 5 * np.tanh(plain / 5), rtol=1e-12)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    path = write_family(tmp_path_factory.mktemp("reference") / "m.gguf", "llama")
    return Reference(open_model(path))


def test_a_model_in_several_files_is_the_model(small: Reference, tmp_path: Path) -> None:
    reader = GGUFReader(small.model.path)
    writer = GGUFWriter(tmp_path / "m.gguf", "llama", split_max_tensors=8)
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            writer.add_key_value(field.name, field.contents(), field.types[0], *field.types[1:])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    first, *others = sorted(tmp_path.glob("m-*.gguf"))
    assert others
    model = open_model(first)
    assert (model.size_bytes, model.type_label) == (small.model.size_bytes, small.model.type_label)
    np.testing.assert_array_equal(Reference(model).logits(PROMPT), small.logits(PROMPT))


@pytest.mark.parametrize(
    ("architecture", "metadata", "reason"),
    [
        ("olmoe", {}, "the architecture olmoe (it knows llama, "),
        ("llama", {"llama__rope__scaling__type": "ntk"}, "RoPE scaling of type ntk"),
        ("llama", {"llama__attention__value_length": 32}, "values of another length than keys"),
    ],
)
def test_what_it_does_not_know_it_refuses(
    tmp_path: Path, architecture: str, metadata: dict[str, Any], reason: str
) -> None:
    shape = SHAPES["tiny"]
    path = write_sparse(tmp_path / "m.gguf", shape, architecture=architecture, **metadata)
    with pytest.raises(BenchError) as caught:
        Reference(open_model(path))
    assert f"{path}: the float64 reference does not know {reason}" in str(caught.value)


def test_layers_that_differ_are_refused(small: Reference) -> None:
    with pytest.raises(BenchError, match="layers that differ in feed_forward_length"):
        Reference(replace(small.model, metadata={"llama.feed_forward_length": [1, 2]}))
