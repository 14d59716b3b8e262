"""Tiny files of the architectures that tinygrad.llm itself runs, and llama.cpp's answers.

`python -m tests.engine.other.upstream_models` writes upstream_golden.json; run it with
llama-cpp-python, which is no dependency of the tests, installed beside orinllm.
"""

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter
from numpy.typing import NDArray

GOLDEN = Path(__file__).with_name("upstream_golden.json")
PROMPT = (3, 141, 59, 26, 5, 35, 89, 79, 32, 38)
DIM, HEADS, VOCAB, CONTEXT = 64, 4, 256, 64
Tensors = dict[str, tuple[int, ...]]
# By architecture: its keys, beside those of all.
Keys = dict[str, int | float | bool | list[int]]


def _experts(prefix: str, shared: int) -> Tensors:
    found: Tensors = {f"{prefix}ffn_gate_inp.weight": (8, DIM)}
    for name, shape in (("gate", (8, 32, DIM)), ("up", (8, 32, DIM)), ("down", (8, DIM, 32))):
        found[f"{prefix}ffn_{name}_exps.weight"] = shape
        if shared:
            found[f"{prefix}ffn_{name}_shexp.weight"] = shape[1:]
    return found


def _dense(prefix: str, hidden: int) -> Tensors:
    return {
        f"{prefix}ffn_gate.weight": (hidden, DIM),
        f"{prefix}ffn_up.weight": (hidden, DIM),
        f"{prefix}ffn_down.weight": (DIM, hidden),
    }


def _attention(prefix: str, q_rows: int, kv_rows: int, norm: tuple[int, int] | None) -> Tensors:
    found: Tensors = {
        f"{prefix}attn_q.weight": (q_rows, DIM),
        f"{prefix}attn_k.weight": (kv_rows, DIM),
        f"{prefix}attn_v.weight": (kv_rows, DIM),
        f"{prefix}attn_output.weight": (DIM, DIM),
    }
    if norm:
        found[f"{prefix}attn_q_norm.weight"] = norm[:1]
        found[f"{prefix}attn_k_norm.weight"] = norm[1:]
    return found


def _olmoe(layer: int) -> Tensors:
    prefix = f"blk.{layer}."
    return {
        f"{prefix}ffn_norm.weight": (DIM,),
        **_attention(prefix, DIM, DIM, (DIM, DIM)),
        **_experts(prefix, 0),
    }


def _glm4moe(layer: int) -> Tensors:
    prefix = f"blk.{layer}."
    found = {f"{prefix}post_attention_norm.weight": (DIM,), **_attention(prefix, DIM, 32, (16, 16))}
    if layer == 0:
        return found | _dense(prefix, 96)
    return found | _experts(prefix, 1) | {f"{prefix}exp_probs_b.bias": (8,)}


def _deepseek2(layer: int) -> Tensors:
    prefix = f"blk.{layer}."
    found: Tensors = {
        f"{prefix}ffn_norm.weight": (DIM,),
        f"{prefix}attn_q_a.weight": (48, DIM),
        f"{prefix}attn_q_a_norm.weight": (48,),
        f"{prefix}attn_q_b.weight": (HEADS * 24, 48),
        f"{prefix}attn_kv_a_mqa.weight": (32 + 8, DIM),
        f"{prefix}attn_kv_a_norm.weight": (32,),
        f"{prefix}attn_k_b.weight": (HEADS, 32, 16),
        f"{prefix}attn_v_b.weight": (HEADS, 16, 32),
        f"{prefix}attn_output.weight": (DIM, HEADS * 16),
    }
    if layer == 0:
        return found | _dense(prefix, 96)
    return found | _experts(prefix, 1) | {f"{prefix}exp_probs_b.bias": (8,)}


def _qwen35(layer: int) -> Tensors:
    prefix = f"blk.{layer}."
    found: Tensors = {f"{prefix}post_attention_norm.weight": (DIM,), **_dense(prefix, 96)}
    if layer % 2:
        return found | _attention(prefix, 2 * DIM, 32, (16, 16))
    return found | {
        f"{prefix}attn_qkv.weight": (64 + 2 * 2 * 16, DIM),
        f"{prefix}attn_gate.weight": (64, DIM),
        f"{prefix}ssm_conv1d.weight": (64 + 2 * 2 * 16, 4),
        f"{prefix}ssm_dt.bias": (4,),
        f"{prefix}ssm_a": (4,),
        f"{prefix}ssm_alpha.weight": (4, DIM),
        f"{prefix}ssm_beta.weight": (4, DIM),
        f"{prefix}ssm_norm.weight": (16,),
        f"{prefix}ssm_out.weight": (DIM, 64),
    }


_MIXTURE: Keys = {"expert_count": 8, "expert_used_count": 3}
_ROUTED: Keys = {
    **_MIXTURE,
    "feed_forward_length": 96,
    "expert_feed_forward_length": 32,
    "leading_dense_block_count": 1,
    "expert_shared_count": 1,
    "expert_gating_func": 2,
    "expert_weights_norm": True,
    "expert_weights_scale": 1.5,
}
MODELS: dict[str, tuple[int, Keys, Callable[[int], Tensors]]] = {
    "olmoe": (2, {**_MIXTURE, "feed_forward_length": 32, "attention.head_count_kv": 4}, _olmoe),
    "glm4moe": (
        2,
        {
            **_ROUTED,
            "attention.head_count_kv": 2,
            "attention.key_length": 16,
            "attention.value_length": 16,
            "rope.dimension_count": 8,
        },
        _glm4moe,
    ),
    "deepseek2": (
        2,
        {
            **_ROUTED,
            "attention.head_count_kv": 1,
            "attention.key_length": 40,
            "attention.value_length": 32,
            "attention.key_length_mla": 24,
            "attention.value_length_mla": 16,
            "attention.kv_lora_rank": 32,
            "attention.q_lora_rank": 48,
            "rope.dimension_count": 8,
        },
        _deepseek2,
    ),
    "qwen35": (
        2,
        {
            "feed_forward_length": 96,
            "attention.head_count_kv": 2,
            "attention.key_length": 16,
            "attention.value_length": 16,
            "rope.dimension_count": 8,
            "rope.dimension_sections": [2, 1, 1, 0],
            "full_attention_interval": 2,
            "ssm.conv_kernel": 4,
            "ssm.state_size": 16,
            "ssm.group_count": 2,
            "ssm.time_step_rank": 4,
            "ssm.inner_size": 64,
        },
        _qwen35,
    ),
}


def _values(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    drawn = rng.standard_normal(shape).astype(np.float32)
    if name.endswith("ssm_a"):
        return -np.abs(drawn)
    if "norm" in name:
        return np.float32(1) + drawn / np.float32(8)
    drawn /= 2 if name.endswith("bias") else np.sqrt(shape[-1])
    return drawn


def _tensors(name: str) -> Iterator[tuple[str, NDArray[np.float32]]]:
    layers, _, of_layer = MODELS[name]
    shapes: Tensors = {"token_embd.weight": (VOCAB, DIM), "output_norm.weight": (DIM,)}
    shapes["output.weight"] = (VOCAB, DIM)
    for layer in range(layers):
        shapes |= {f"blk.{layer}.attn_norm.weight": (DIM,), **of_layer(layer)}
    rng = np.random.default_rng(12)
    for tensor, shape in shapes.items():
        yield tensor, _values(rng, tensor, shape)


def write(path: Path, name: str) -> None:
    """Write the tiny file of an architecture."""
    layers, keys, _ = MODELS[name]
    writer = GGUFWriter(path, name)
    writer.add_block_count(layers)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(DIM)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    for key, value in keys.items():
        add: dict[type, Any] = {
            int: writer.add_uint32,
            float: writer.add_float32,
            bool: writer.add_bool,
            list: writer.add_array,
        }
        add[type(value)](f"{name}.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"t{i}" for i in range(VOCAB)])
    writer.add_token_types([1] * VOCAB)
    writer.add_token_merges(["t 0"])
    for tensor, values in _tensors(name):
        writer.add_tensor(tensor, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Write llama.cpp's logits of the last position, rounded."""
    from tests.benchmarks.check import llama_cpp_golden

    golden = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in MODELS:
            path = Path(folder) / f"{name}.gguf"
            write(path, name)
            rows = llama_cpp_golden.logits(path, CONTEXT, tokens=list(PROMPT))
            golden[name] = [round(float(value), 5) for value in rows[-1]]
    GOLDEN.write_text(json.dumps(golden) + "\n")


if __name__ == "__main__":
    main()
