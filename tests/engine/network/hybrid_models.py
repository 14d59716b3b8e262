"""Tiny files of the families with recurrent states or shared caches: their keys and tensors.

hybrid_golden.py has transformers compute the same weights. `wide` makes those whose
heads and rows the fused kernels take.
"""

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from numpy.typing import NDArray

DIM, VOCAB, CONTEXT, HEADS = 64, 64, 256, 4
PROMPT = tuple(int(i) for i in np.random.default_rng(3).integers(3, VOCAB, 150))
Shapes = dict[str, tuple[int, ...]]
Keys = dict[str, int | float | bool | list[int] | list[bool]]
_DELTA: Keys = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 64,
}
_MAMBA: Keys = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 24,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 8,
    "ssm.inner_size": 128,
}
_EXPERTS: Keys = {"expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": 32}
_HEAD: Keys = {"attention.key_length": 16, "attention.value_length": 16}


def _attention(size: int = 16, q: int = 1, norms: bool = True, own: bool = True) -> Shapes:
    found: Shapes = {"attn_q.weight": (q * HEADS * size, DIM)}
    if own:
        found |= {f"attn_{name}.weight": (2 * size, DIM) for name in "kv"}
    found["attn_output.weight"] = (DIM, HEADS * size)
    if norms:
        found |= {f"attn_{name}_norm.weight": (size,) for name in ("qk" if own else "q")}
    return found


def _dense(hidden: int = 96, gate: bool = True, of: str = "") -> Shapes:
    found: Shapes = {f"ffn_gate{of}.weight": (hidden, DIM)} if gate else {}
    return found | {f"ffn_up{of}.weight": (hidden, DIM), f"ffn_down{of}.weight": (DIM, hidden)}


def _mixture(gate: bool = True, bias: bool = False, shared: int = 0) -> Shapes:
    found: Shapes = {"ffn_gate_inp.weight": (8, DIM)}
    for name, shape in _dense(32, gate, "_exps").items():
        found[name] = (8, *shape)
    if bias:
        found["exp_probs_b.bias"] = (8,)
    return found | (_dense(shared, gate, "_shexp") if shared else {})


def _mamba() -> Shapes:
    return {
        "ssm_in.weight": (2 * 128 + 2 * 2 * 24 + 8, DIM),
        "ssm_conv1d.weight": (128 + 2 * 2 * 24, 4),
        "ssm_conv1d.bias": (128 + 2 * 2 * 24,),
        "ssm_dt.bias": (8,),
        "ssm_a": (8, 1),
        "ssm_d": (8, 1),
        "ssm_norm.weight": (2, 64),
        "ssm_out.weight": (DIM, 128),
    }


def _delta() -> Shapes:
    return {
        "attn_qkv.weight": (128, DIM),
        "attn_gate.weight": (64, DIM),
        "ssm_conv1d.weight": (128, 4),
        "ssm_dt.bias": (4,),
        "ssm_a": (4,),
        "ssm_alpha.weight": (4, DIM),
        "ssm_beta.weight": (4, DIM),
        "ssm_norm.weight": (16,),
        "ssm_out.weight": (DIM, 64),
    }


def _conv() -> Shapes:
    return {
        "shortconv.in_proj.weight": (3 * DIM, DIM),
        "shortconv.conv.weight": (DIM, 3),
        "shortconv.out_proj.weight": (DIM, DIM),
    }


def _norms(*names: str) -> Shapes:
    return {f"{name}.weight": (DIM,) for name in names}


def _gemma4(near: bool, own: bool) -> Shapes:
    return {
        **_norms("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "post_norm"),
        **_attention(16 if near else 32, own=own),
        **_dense(),
        "inp_gate.weight": (32, DIM),
        "proj.weight": (DIM, 32),
        "layer_output_scale.weight": (1,),
    }


def _gemma4_experts(near: bool) -> Shapes:
    """A layer of the 26B: no embedding of its own, far keys are the values, experts beside."""
    found = _attention(16 if near else 32) | _norms("attn_norm", "post_attention_norm")
    if not near:
        del found["attn_v.weight"]
        found["attn_k.weight"] = (32, DIM)
    found |= _norms("ffn_norm", "pre_ffw_norm_2", *(f"post_ffw_norm{n}" for n in ("", "_1", "_2")))
    return found | {
        **_dense(),
        "ffn_gate_inp.weight": (8, DIM),
        "ffn_gate_inp.scale": (DIM,),
        "ffn_gate_up_exps.weight": (8, 64, DIM),
        "ffn_down_exps.weight": (8, DIM, 32),
        "ffn_down_exps.scale": (8,),
        "layer_output_scale.weight": (1,),
    }


_TWO, _ONE = _norms("attn_norm", "ffn_norm"), _norms("attn_norm")
_QWEN = _norms("attn_norm", "post_attention_norm")
_LFM2: Keys = {"shortconv.l_cache": 3, "rope.freq_base": 1e6, "feed_forward_length": 96}
_QWEN35: Keys = {
    **_DELTA,
    "attention.head_count_kv": 2,
    "attention.key_length": 32,
    "attention.value_length": 32,
    "rope.dimension_count": 8,
    "full_attention_interval": 2,
}
_GEMMA4: Keys = {
    "attention.key_length": 32,
    "attention.value_length": 32,
    "attention.key_length_swa": 16,
    "attention.value_length_swa": 16,
    "attention.sliding_window": 8,
    "rope.dimension_count": 32,
    "rope.dimension_count_swa": 16,
    "rope.freq_base": 1e6,
    "rope.freq_base_swa": 1e4,
    "feed_forward_length": 96,
    "final_logit_softcapping": 5.0,
}
# By name: architecture, keys, tensors by layer.
MODELS: dict[str, tuple[str, Keys, list[Shapes]]] = {
    "lfm2": (
        "lfm2",
        {**_LFM2, "attention.head_count_kv": [0, 2, 0]},
        [_TWO | mixer | _dense() for mixer in (_conv(), _attention(), _conv())],
    ),
    "lfm2moe": (
        "lfm2moe",
        {
            **(_LFM2 | _EXPERTS),
            "attention.head_count_kv": [0, 2],
            "leading_dense_block_count": 1,
            "expert_gating_func": 2,
        },
        [_TWO | _conv() | _dense(), _TWO | _attention() | _mixture(bias=True)],
    ),
    "qwen35": (
        "qwen35",
        {**_QWEN35, "feed_forward_length": 96},
        [_QWEN | mixer | _dense() for mixer in (_delta(), _attention(32, q=2))],
    ),
    "qwen35moe": (
        "qwen35moe",
        {**_QWEN35, **_EXPERTS, "expert_shared_feed_forward_length": 48},
        [
            _QWEN | mixer | _mixture(shared=48) | {"ffn_gate_inp_shexp.weight": (DIM,)}
            for mixer in (_delta(), _attention(32, q=2))
        ],
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            **(_MAMBA | _HEAD),
            "attention.head_count_kv": [0, 2, 0, 0],
            "feed_forward_length": [0, 0, 96, 0],
        },
        [_ONE | part for part in (_mamba(), _attention(norms=False), _dense(gate=False), _mamba())],
    ),
    "nemotron_h_moe": (
        "nemotron_h_moe",
        {
            **(_MAMBA | _HEAD | _EXPERTS),
            "attention.head_count_kv": [0, 2, 0],
            "feed_forward_length": [0, 0, 32],
            "expert_shared_feed_forward_length": 48,
            "expert_shared_count": 1,
            "expert_weights_norm": True,
            "expert_weights_scale": 1.5,
            "expert_group_count": 1,
        },
        [
            _ONE | part
            for part in (
                _mamba(),
                _attention(norms=False),
                _mixture(gate=False, bias=True, shared=48),
            )
        ],
    ),
    "granitehybrid": (
        "granitehybrid",
        {
            **(_MAMBA | _EXPERTS),
            "attention.head_count_kv": [0, 2],
            "feed_forward_length": 32,
            "expert_shared_feed_forward_length": 48,
            "rope.scaling.finetuned": False,
            "attention.scale": 0.3,
            "embedding_scale": 3.0,
            "residual_scale": 0.4,
            "logit_scale": 2.0,
        },
        [_TWO | mixer | _mixture(shared=48) for mixer in (_mamba(), _attention(norms=False))],
    ),
    "gemma4": (
        "gemma4",
        {
            **_GEMMA4,
            "attention.head_count_kv": 2,
            "attention.sliding_window_pattern": [True, False, True, False],
            "attention.shared_kv_layers": 2,
            "embedding_length_per_layer_input": 32,
        },
        [_gemma4(layer % 2 == 0, layer < 2) for layer in range(4)],
    ),
    "gemma4moe": (
        "gemma4",
        {
            **(_GEMMA4 | _EXPERTS),
            "attention.head_count_kv": [2, 1],
            "attention.sliding_window_pattern": [True, False],
            "embedding_length_per_layer_input": 0,
        },
        [_gemma4_experts(near) for near in (True, False)],
    ),
}


# How much wider the models for the fused kernels are, and keys that are widths.
WIDER = 4
_WIDTHS = (
    *("length", "length_swa", "length_per_layer_input", "_size"),
    *("dimension_count", "dimension_count_swa"),
)
# Elements of tensors that are as many in a wide model: of a whole one, or of one axis.
_ALIKE = (
    *("ssm_dt.bias", "ssm_a", "ssm_d", "exp_probs_b.bias", "layer_output_scale.weight"),
    "ffn_down_exps.scale",
)
_AXES = {"ssm_conv1d.weight": 1, "shortconv.conv.weight": 1, "ssm_norm.weight": 0}
_AXES |= {f"{name}.weight": 0 for name in ("ssm_alpha", "ssm_beta", "ffn_gate_inp", "token_embd")}
_AXES |= {f"{name}.weight": 0 for name in ("output", "per_layer_token_embd")}
_AXES |= {f"ffn_{name}_exps.weight": 0 for name in ("gate", "up", "gate_up", "down")}
_MAMBA_HEADS = 8  # the last rows of ssm_in
_SMALL = ("conv1d.weight", "shortconv.conv.weight", "ssm_norm.weight")


def _wide_shape(tensor: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    short = tensor.split(".", 2)[2] if tensor.startswith("blk.") else tensor
    if short in _ALIKE:
        return shape
    if short == "ssm_in.weight":
        return WIDER * (shape[0] - _MAMBA_HEADS) + _MAMBA_HEADS, WIDER * shape[1]
    kept = _AXES.get(short) if len(shape) > 1 else None
    return tuple(n if axis == kept else WIDER * n for axis, n in enumerate(shape))


def wide(keys: Keys) -> Keys:
    """Return a model's keys with all of its widths WIDER times as many elements."""
    found = dict(keys)
    for key, value in keys.items():
        if key.endswith(_WIDTHS):
            found[key] = (
                [WIDER * n for n in value] if isinstance(value, list) else WIDER * int(value)
            )
    return found


def block(name: str) -> Shapes:
    """Return the tensors of a block that proposes tokens: one like the last layer."""
    own = {"nextn.eh_proj.weight": (DIM, 2 * DIM)}
    return MODELS[name][2][-1] | own | _norms(*(f"nextn.{n}" for n in _BLOCK_NORMS))


_BLOCK_NORMS = ("enorm", "hnorm", "shared_head_norm")


def tensors(name: str, wider: bool = False, mtp: bool = False) -> dict[str, NDArray[np.float32]]:
    """Return the weights of a model, all of which 16-bit floats hold; `mtp`: and of a block."""
    architecture, _, layers = MODELS[name]
    layers = [*layers, block(name)] if mtp else layers
    shapes: Shapes = {"token_embd.weight": (VOCAB, DIM), "output.weight": (VOCAB, DIM)}
    shapes[f"{'token_embd' if 'lfm2' in name else 'output'}_norm.weight"] = (DIM,)
    if name == "gemma4":
        shapes["per_layer_token_embd.weight"] = (VOCAB, 32 * len(layers))
        shapes["per_layer_model_proj.weight"] = (32 * len(layers), DIM)
        shapes["per_layer_proj_norm.weight"] = (32,)
    for index, layer in enumerate(layers):
        shapes |= {f"blk.{index}.{tensor}": shape for tensor, shape in layer.items()}
    if wider:
        shapes = {tensor: _wide_shape(tensor, shape) for tensor, shape in shapes.items()}
    rng = np.random.default_rng(12)
    found = {tensor: _values(rng, tensor, shape) for tensor, shape in shapes.items()}
    if architecture == "gemma4":
        by = WIDER if wider else 1
        found["rope_freqs.weight"] = np.array([1] * 4 * by + [1e30] * 12 * by, np.float32)
    return found


def _values(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    drawn = rng.standard_normal(shape).astype(np.float32)
    if name.endswith("ssm_a"):
        drawn = -np.abs(drawn) - np.float32(0.01)
    elif "norm" in name or "output_scale" in name or name.endswith(".scale"):
        drawn = np.float32(1) + drawn / np.float32(8)
        if name.endswith("inp.scale"):  # which is over the root of the width
            drawn *= np.float32(np.sqrt(shape[0]))
    elif not name.endswith("ssm_d"):
        drawn /= np.float32(2 if name.endswith("bias") else np.sqrt(shape[-1]))
    return drawn.astype(np.float16).astype(np.float32)


# Matrices that are floats in every file.
_FLOATS = (*_ALIKE, "ffn_gate_inp.weight", "ssm_alpha.weight", "ssm_beta.weight")


def write(path: Path, name: str, quant: str | None = None, mtp: bool = False) -> None:
    """Write the file of a model; `quant`: of a wide one, whose matrices are of that type.

    `mtp`: with a block that proposes tokens.
    """
    architecture, keys, layers = MODELS[name]
    keys = (wide(keys) if quant else keys) | ({"nextn_predict_layers": 1} if mtp else {})
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(len(layers) + mtp)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDER * DIM if quant else DIM)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in ({"rope.freq_base": 1e4} | keys).items():
        full = f"{architecture}.{key}"
        if isinstance(value, list):
            writer.add_array(full, value)
        elif isinstance(value, bool):
            writer.add_bool(full, value)
        elif isinstance(value, float):
            writer.add_float32(full, value)
        else:
            writer.add_uint32(full, value)
    for tensor, values in tensors(name, quant is not None, mtp).items():
        packs = quant and values.ndim > 1 and not tensor.endswith((*_FLOATS, *_SMALL))
        if packs:
            kind = GGMLQuantizationType[str(quant)]
            writer.add_tensor(tensor, quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
