from dataclasses import replace
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from tests.benchmarks.gguf_files import add_info, finish_sparse, write_family, write_sparse

from orinbench.errors import BenchError
from orinbench.model import open_model
from orinbench.synth import write_synthetic
from orinbench.synth.shapes import SHAPES

TINY = SHAPES["tiny"]


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("model") / "small.gguf", "llama", tied=False)


def refusal(path: Path) -> str:
    """Open a bad file and return the one line."""
    with pytest.raises(BenchError) as caught:
        open_model(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    assert caught.value.exit_code == 2
    return message.removeprefix(f"{path}: ")


def test_it_reads_what_the_gguf_library_reads(family: Path) -> None:
    model, reader = open_model(family), GGUFReader(family)
    assert [
        (tensor.name, tensor.tensor_type, tuple(reversed(tensor.shape.tolist())))
        for tensor in reader.tensors
    ] == [(tensor.name, tensor.type, tensor.shape) for tensor in model.tensors.values()]
    assert [(tensor.n_bytes, tensor.data_offset) for tensor in reader.tensors] == [
        (tensor.n_bytes, tensor.offset) for tensor in model.tensors.values()
    ]
    assert model.metadata["llama.rope.freq_base"] == 10000.0
    assert model.vocab_size == len(reader.fields["tokenizer.ggml.tokens"].contents())
    assert (model.n_layers, model.n_embd, model.n_heads, model.n_kv_heads) == (2, 128, 4, 2)
    assert (model.head_dim, model.context_length, model.name) == (32, 128, "small")
    assert model.size_bytes == sum(tensor.n_bytes for tensor in reader.tensors)


# The weights alone, as in 4,268 GB/s / 1,013,698,560 B = 4,210 tok/s; norms are F32 and read too.
@pytest.mark.parametrize(("shape", "matrices"), [("1b", 1_013_698_560), ("8b", 6_156_165_120)])
def test_a_token_reads_all_but_the_other_rows_of_the_embedding(
    tmp_path: Path, shape: str, matrices: int
) -> None:
    model = open_model(write_sparse(tmp_path / "m.gguf", SHAPES[shape]))
    norms = (2 * model.n_layers + 1) * model.n_embd * 4
    row = 0 if model.has_tied_head else model.n_embd // 256 * 210
    assert model.token_read_bytes == matrices + norms + row
    assert model.token_read_by_tensor["token_embd.weight"] == (
        model.tensors["token_embd.weight"].n_bytes if model.has_tied_head else row
    )
    assert sum(model.token_read_by_tensor.values()) == model.token_read_bytes


def test_a_token_reads_no_block_behind_the_layers(tmp_path: Path) -> None:
    read = []
    for shape in ("tiny-qwen35", "tiny-qwen35-mtp"):
        write_synthetic(tmp_path / "m.gguf", shape, "Q6_K", 0)
        read.append(open_model(tmp_path / "m.gguf").token_read_bytes)
    assert read[0] == read[1] > 0


def test_a_token_reads_the_experts_that_it_uses(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "moe.gguf", "qwen3moe")
    for key in ("block_count", "context_length", "embedding_length", "attention.head_count"):
        writer.add_uint32(f"qwen3moe.{key}", 256)
    writer.add_uint32("qwen3moe.expert_used_count", 2)
    add_info(writer, "token_embd.weight", (512, 256), GGMLQuantizationType.Q6_K)
    add_info(writer, "blk.0.ffn_up_exps.weight", (8, 512, 256), GGMLQuantizationType.Q4_K)
    model = open_model(finish_sparse(writer))
    assert model.token_read_by_tensor["blk.0.ffn_up_exps.weight"] == 2 * 512 * 144


@pytest.mark.parametrize(
    ("architecture", "changes", "label"),
    [
        ("llama", {"n_layers": 16}, "llama 1B Q6_K"),
        ("llama", {"n_layers": 28}, "llama 3B Q6_K"),
        ("llama", {"n_layers": 32, "vocab_size": 128256}, "llama 8B Q6_K"),
        ("llama", {"n_layers": 32, "vocab_size": 32000}, "llama 7B Q6_K"),
        ("llama", {"n_layers": 32, "vocab_size": 49152}, "llama 3B Q6_K"),
        ("llama", {"n_layers": 80, "n_heads": 64, "n_kv_heads": 8}, "llama 70B Q6_K"),
        ("llama", {"n_layers": 80, "n_heads": 64, "n_kv_heads": 64}, "llama 65B Q6_K"),
        ("llama", {"n_layers": 2}, "llama ?B Q6_K"),
        ("qwen2", {"n_layers": 24, "n_embd": 1024}, "qwen2 0.5B Q6_K"),
        ("qwen2", {"n_layers": 40, "n_heads": 20}, "qwen2 4B Q6_K"),
        ("qwen2", {"n_layers": 28}, "qwen2 7B Q6_K"),
        ("qwen3", {"n_layers": 28, "n_embd": 1024}, "qwen3 0.6B Q6_K"),
        ("qwen3", {"n_layers": 28, "n_embd": 2048}, "qwen3 1.7B Q6_K"),
    ],
)
def test_models_are_called_as_llama_cpp_calls_them(
    tmp_path: Path, architecture: str, changes: dict[str, int], label: str
) -> None:
    shape = replace(TINY, **{"vocab_size": 256, **changes})  # type: ignore[arg-type]
    path = write_sparse(tmp_path / "m.gguf", shape, architecture=architecture)
    assert open_model(path).type_label == label


@pytest.mark.parametrize(
    ("file_type", "label"),
    [
        (0, "all F32"),
        (1, "F16"),
        (7, "Q8_0"),
        (14, "Q4_K - Small"),
        (15, "Q4_K - Medium"),
        (18, "Q6_K"),
        (27, "IQ3_S mix - 3.66 bpw"),
        (30, "IQ4_XS - 4.25 bpw"),
        (38, "MXFP4 MoE"),
        (99, "unknown, may not work"),
    ],
)
def test_file_types_are_called_as_llama_cpp_calls_them(
    tmp_path: Path, file_type: int, label: str
) -> None:
    path = write_sparse(tmp_path / "m.gguf", TINY, general__file_type=file_type)
    assert open_model(path).type_label == f"llama ?B {label}"


def test_a_mixtral_is_called_by_its_experts(tmp_path: Path) -> None:
    path = write_sparse(tmp_path / "m.gguf", replace(TINY, n_layers=32), llama__expert_count=8)
    assert open_model(path).type_label == "llama 8x7B Q6_K"


def test_without_a_file_type_the_most_frequent_tensor_type_is_guessed(tmp_path: Path) -> None:
    path = write_sparse(tmp_path / "m.gguf", TINY, "Q4_K", drop=("general.file_type",))
    assert open_model(path).type_label == "llama ?B (guessed) Q4_K - Medium"


def test_a_missing_file(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none.gguf").startswith("no such file")


def test_an_unsupported_architecture_is_named_with_those_that_are(tmp_path: Path) -> None:
    message = refusal(write_sparse(tmp_path / "m.gguf", TINY, architecture="mamba"))
    assert message.startswith("architecture 'mamba' is not supported; supported are llama, ")


def test_an_unsupported_type_is_named_with_those_that_are(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    add_info(writer, "token_embd.weight", (512, 256), GGMLQuantizationType.Q6_K)
    add_info(writer, "blk.0.ffn_up.weight", (512, 256), GGMLQuantizationType.IQ1_S)
    message = refusal(finish_sparse(writer))
    assert message.startswith(
        "tensor blk.0.ffn_up.weight has the type IQ1_S, which is not supported"
    )
    assert "supported are F32, F16, " in message and " MXFP4" in message


def test_missing_metadata_is_named(tmp_path: Path) -> None:
    path = write_sparse(tmp_path / "m.gguf", TINY, drop=("llama.block_count",))
    assert refusal(path).startswith("llama.block_count is None in the metadata")


def test_metadata_of_a_wrong_kind_is_named(tmp_path: Path) -> None:
    path = write_sparse(tmp_path / "m.gguf", TINY, llama__block_count="two")
    assert refusal(path).startswith("llama.block_count is 'two' in the metadata")


def test_a_file_without_an_embedding(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    add_info(writer, "v.patch_embd.weight", (4, 256), GGMLQuantizationType.F32)
    assert "no tensor token_embd.weight" in refusal(finish_sparse(writer))
