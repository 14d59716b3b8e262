"""GGUF files that the tests write: small random models of several families, and broken ones."""

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from numpy.random import PCG64

from orinbench.synth.random_blocks import normal_floats
from orinbench.synth.shapes import QUANTS, ModelShape, WeightDraw

LAYERS, EMBD, FF, HEADS, KV_HEADS, VOCAB = 2, 128, 256, 4, 2, 320


def write_family(
    path: Path,
    architecture: str,
    *,
    bias: bool = False,
    qk_norm: bool = False,
    rope_freqs: bool = False,
    tied: bool = True,
    head_dim: int = 32,
    seed: int = 1,
) -> Path:
    """Write a two-layer F16 model of a family, with a byte-level tokenizer."""
    bits = PCG64(seed)
    writer = GGUFWriter(path, architecture)
    writer.add_name(path.stem)
    writer.add_file_type(1)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(EMBD)
    writer.add_feed_forward_length(FF)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe" if architecture == "llama" else "qwen2")
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    tokens = [chr(byte if byte in printable else 256 + byte) for byte in range(256)]
    tokens += [f"a{chr(97 + index // 26)}{chr(97 + index % 26)}" for index in range(VOCAB - 256)]
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (VOCAB - 1) + [3])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(VOCAB - 1)
    writer.add_eos_token_id(VOCAB - 1)

    def matrix(name: str, rows: int, columns: int) -> None:
        values = 0.09 * normal_floats(bits, rows * columns).reshape(rows, columns)
        writer.add_tensor(name, values.astype(np.float16))

    def vector(name: str, size: int, mean: float = 1.0) -> None:
        writer.add_tensor(name, (mean + 0.2 * normal_floats(bits, size)).astype(np.float32))

    matrix("token_embd.weight", VOCAB, EMBD)
    for layer in range(LAYERS):
        prefix = f"blk.{layer}."
        vector(f"{prefix}attn_norm.weight", EMBD)
        vector(f"{prefix}ffn_norm.weight", EMBD)
        for name, rows in (("q", HEADS * head_dim), ("k", KV_HEADS * head_dim)):
            matrix(f"{prefix}attn_{name}.weight", rows, EMBD)
            if bias:
                vector(f"{prefix}attn_{name}.bias", rows, 0.0)
            if qk_norm:
                vector(f"{prefix}attn_{name}_norm.weight", head_dim)
        matrix(f"{prefix}attn_v.weight", KV_HEADS * head_dim, EMBD)
        if bias:
            vector(f"{prefix}attn_v.bias", KV_HEADS * head_dim, 0.0)
        matrix(f"{prefix}attn_output.weight", EMBD, HEADS * head_dim)
        matrix(f"{prefix}ffn_gate.weight", FF, EMBD)
        matrix(f"{prefix}ffn_up.weight", FF, EMBD)
        matrix(f"{prefix}ffn_down.weight", EMBD, FF)
    vector("output_norm.weight", EMBD)
    if not tied:
        matrix("output.weight", VOCAB, EMBD)
    if rope_freqs:
        factors = np.linspace(1, 8, head_dim // 2).astype(np.float32)
        writer.add_tensor("rope_freqs.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_sparse(
    path: Path,
    shape: ModelShape,
    quant: str = "Q6_K",
    architecture: str = "llama",
    drop: tuple[str, ...] = (),
    **metadata: Any,
) -> Path:
    """Write the header of a model of any size; the weights are a hole in the file.

    `metadata` adds keys or replaces them, with `__` for a dot; `drop` leaves keys out.
    """
    writer = GGUFWriter(path, architecture)
    values = {
        "general.file_type": int(QUANTS[quant].file_type),
        f"{architecture}.block_count": shape.n_layers,
        f"{architecture}.context_length": shape.context_length,
        f"{architecture}.embedding_length": shape.n_embd,
        f"{architecture}.attention.head_count": shape.n_heads,
        f"{architecture}.attention.head_count_kv": shape.n_kv_heads,
        f"{architecture}.attention.key_length": shape.head_dim,
        **{key.replace("__", "."): value for key, value in metadata.items()},
    }
    for key, value in values.items():
        if key not in drop:
            (writer.add_string if isinstance(value, str) else writer.add_uint32)(key, value)
    for name, dims, draw in shape.tensors():
        of_matrix = QUANTS[quant].type_of(name, shape)
        add_info(
            writer, name, dims, of_matrix if draw == WeightDraw.MATRIX else GGMLQuantizationType.F32
        )
    return finish_sparse(writer)


def add_info(
    writer: GGUFWriter, name: str, dims: tuple[int, ...], tensor_type: GGMLQuantizationType
) -> None:
    block, block_bytes = GGML_QUANT_SIZES[tensor_type]
    n_bytes = int(np.prod(dims)) // block * block_bytes
    writer.add_tensor_info(name, dims, np.dtype(np.float32), n_bytes, raw_dtype=tensor_type)


def finish_sparse(writer: GGUFWriter) -> Path:
    """Write the header and as many zeros as the tensors need, as a hole."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    (file,) = writer.fout
    writer.write_padding(file, file.tell())
    data = sum(writer.ggml_pad(info.nbytes, 32) for info in writer.tensors[0].values())
    file.truncate(file.tell() + data)
    path: Path = writer.path
    writer.close()
    return path
