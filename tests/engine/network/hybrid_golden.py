"""Write hybrid_golden.json: logits of hybrid_models.py's models by transformers.

Run with torch 2.13, which is no dependency of the tests, installed beside transformers:
`python -m tests.engine.network.hybrid_golden`. All is float64 on a CPU; weights are renamed and
reordered as llama.cpp's converters do it, the other way round.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tests.engine.network.hybrid_models import CONTEXT, DIM, HEADS, MODELS, PROMPT, VOCAB, tensors

GOLDEN = Path(__file__).with_name("hybrid_golden.json")
#: Positions whose logits are recorded: within a chunk, behind several.
POSITIONS = (9, 149)
Values = NDArray[np.float32]
_ATTENTION = {f"attn_{n}": f"self_attn.{n}_proj" for n in "qkv"}
_PLAIN = {
    **_ATTENTION,
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    **{f"ffn_{n}": f"mlp.{n}_proj" for n in ("gate", "up", "down")},
}
_LFM2 = {
    **_ATTENTION,
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "ffn_gate_inp": "feed_forward.gate",
    "exp_probs_b.bias": "feed_forward.expert_bias",
    "experts": "feed_forward.experts",
    **{f"shortconv.{n}": f"conv.{n}" for n in ("in_proj", "conv", "out_proj")},
}
_MAMBA = {
    "ssm_in": "in_proj",
    "ssm_out": "out_proj",
    "ssm_norm": "norm",
    "ssm_conv1d": "conv1d",
    "ssm_dt.bias": "dt_bias",
    "ssm_a": "A_log",
    "ssm_d": "D",
}
_QWEN = {
    **_PLAIN,
    **{f"ffn_{n}_shexp": f"mlp.shared_expert.{n}_proj" for n in ("gate", "up", "down")},
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "experts": "mlp.experts",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    **{name: f"linear_attn.{of}" for name, of in _MAMBA.items()},
}
_NEMOTRON = {
    **{f"attn_{n}": f"mixer.{n}_proj" for n in "qkv"},
    "attn_output": "mixer.o_proj",
    "attn_norm": "norm",
    **{f"ffn_{n}": f"mixer.{n}_proj" for n in ("up", "down")},
    **{f"ffn_{n}_shexp": f"mixer.shared_experts.{n}_proj" for n in ("up", "down")},
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "experts": "mixer.experts",
    **{name: f"mixer.{of}" for name, of in _MAMBA.items()},
}
_GRANITE = {
    **_PLAIN,
    "ffn_gate_inp": "block_sparse_moe.router",
    "experts": "block_sparse_moe.experts",
    "ffn_gate_up_shexp": "shared_mlp.input_linear",
    "ffn_down_shexp": "shared_mlp.output_linear",
    **{name: f"mamba.{of}" for name, of in _MAMBA.items()},
}
_GEMMA4 = {
    **_PLAIN,
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "layer_output_scale": "layer_scalar",
    **{f"post_ffw_norm_{n}": f"post_feedforward_layernorm_{n}" for n in (1, 2)},
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "experts": "experts",
}
_TOP = {
    "token_embd": "model.embed_tokens",
    "output": "lm_head",
    "output_norm": "model.norm",
    "token_embd_norm": "model.embedding_norm",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": DIM,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,
    **dict.fromkeys(("attn_implementation", "experts_implementation"), "eager"),
}
_EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
_MAMBA_SIZES: dict[str, Any] = {
    "conv_kernel": 4,
    "ssm_state_size": 24,
    "n_groups": 2,
    "mamba_num_heads": 8,
}
_RECURRENT, _FULL = "linear_attention", "full_attention"


def _rope(base: float, **more: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": base, **more}


def _lfm2(name: str) -> tuple[Any, dict[str, str]]:
    import transformers

    sizes: dict[str, Any] = _SIZES | {"rope_parameters": _rope(1e6), "norm_eps": 1e-5}
    if name == "lfm2":
        types = ["conv", _FULL, "conv"]
        config = transformers.Lfm2Config(
            **sizes, block_auto_adjust_ff_dim=False, num_hidden_layers=3, layer_types=types
        )
        return transformers.Lfm2ForCausalLM(config), _LFM2
    more = transformers.Lfm2MoeConfig(
        **sizes, **_EXPERTS, num_dense_layers=1, num_hidden_layers=2, layer_types=["conv", _FULL]
    )
    return transformers.Lfm2MoeForCausalLM(more), _LFM2


def _qwen35(name: str) -> tuple[Any, dict[str, str]]:
    import transformers

    sizes: dict[str, Any] = {
        **_SIZES,
        "rms_norm_eps": 1e-5,
        "head_dim": 32,
        "num_hidden_layers": 2,
        "layer_types": [_RECURRENT, _FULL],
        "rope_parameters": _rope(1e4, partial_rotary_factor=0.25),
        **{f"linear_{of}_head_dim": 16 for of in ("key", "value")},
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    }
    if name == "qwen35":
        return transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**sizes)), _QWEN
    del sizes["intermediate_size"]
    config = transformers.Qwen3_5MoeTextConfig(
        **sizes, **_EXPERTS, shared_expert_intermediate_size=48
    )
    return transformers.Qwen3_5MoeForCausalLM(config), _QWEN


def _nemotron(name: str) -> tuple[Any, dict[str, str]]:
    import transformers

    types = ["mamba", "attention", "mlp", "mamba"]
    config = transformers.NemotronHConfig(
        **(_SIZES | _MAMBA_SIZES),
        head_dim=16,
        mamba_head_dim=16,
        layer_norm_epsilon=1e-5,
        layers_block_type=types if name == "nemotron_h" else ["mamba", "attention", "moe"],
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=48,
        routed_scaling_factor=1.5,
        use_mamba_kernels=False,
    )
    return transformers.NemotronHForCausalLM(config), _NEMOTRON


def _granite(name: str) -> tuple[Any, dict[str, str]]:
    import transformers

    config = transformers.GraniteMoeHybridConfig(
        **(_SIZES | {"intermediate_size": 32}),
        rms_norm_eps=1e-5,
        shared_intermediate_size=48,
        num_local_experts=8,
        num_experts_per_tok=3,
        num_hidden_layers=2,
        layer_types=["mamba", "attention"],
        mamba_n_heads=8,
        mamba_d_head=16,
        mamba_n_groups=2,
        mamba_d_state=24,
        attention_multiplier=0.3,
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        logits_scaling=2.0,
    )
    return transformers.GraniteMoeHybridForCausalLM(config), _GRANITE


def _gemma4(name: str) -> tuple[Any, dict[str, str]]:
    import transformers

    far_heads: dict[str, Any] = {"global_head_dim": 32}
    far = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
    more: dict[str, Any] = {"num_hidden_layers": 4, "num_kv_shared_layers": 2}
    if name == "gemma4moe":
        far_heads |= {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
        more = {"num_hidden_layers": 2, "num_kv_shared_layers": 0, "enable_moe_block": True}
        more |= {"num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 32}
    config = transformers.Gemma4TextConfig(
        **_SIZES,
        **more,
        rms_norm_eps=1e-5,
        vocab_size_per_layer_input=VOCAB,
        head_dim=16,
        **far_heads,
        hidden_size_per_layer_input=0 if name == "gemma4moe" else 32,
        layer_types=["sliding_attention", _FULL] * (more["num_hidden_layers"] // 2),
        sliding_window=8,
        final_logit_softcapping=5.0,
        rope_parameters={"sliding_attention": _rope(1e4), _FULL: far},
    )
    return transformers.Gemma4ForCausalLM(config), _GEMMA4


FAMILIES: dict[str, Callable[[str], tuple[Any, dict[str, str]]]] = {
    **dict.fromkeys(("lfm2", "lfm2moe"), _lfm2),
    **dict.fromkeys(("qwen35", "qwen35moe"), _qwen35),
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), _nemotron),
    "granitehybrid": _granite,
    **dict.fromkeys(("gemma4", "gemma4moe"), _gemma4),
}


def _heads(values: Values, axis: int, size: int) -> Values:
    """Return value heads in transformers' order: all of a key head, then those of the next."""
    of_head = np.moveaxis(values, axis, 0).reshape(2, 2, size, -1)  # second, first ones; size
    back = of_head.transpose(1, 0, 2, 3).reshape(np.moveaxis(values, axis, 0).shape)
    return np.moveaxis(back, 0, axis)


def _delta_order(tensor: str, values: Values) -> Values:
    """Undo what llama.cpp's converter does to a Qwen3.5's value heads and norms."""
    if tensor in ("attn_qkv.weight", "ssm_conv1d.weight"):
        return np.concatenate((values[:64], _heads(values[64:], 0, 16)))
    if tensor in ("attn_gate.weight", "ssm_alpha.weight", "ssm_beta.weight"):
        return _heads(values, 0, len(values) // 4)
    if tensor in ("ssm_a", "ssm_dt.bias"):
        return _heads(values, 0, 1)
    if tensor == "ssm_out.weight":
        return _heads(values, 1, 16)
    if "norm" in tensor and not tensor.startswith("ssm_norm"):
        return values - 1
    return values


def _theirs(name: str, names: dict[str, str]) -> dict[str, Values]:
    """Return the weights as transformers calls and shapes them."""
    found, delta = {}, name.startswith("qwen35")
    given = tensors(name)
    for layer in range(len(MODELS[name][2])):
        for of in ("shexp", "exps"):
            gate, up = (f"blk.{layer}.ffn_{n}_{of}.weight" for n in ("gate", "up"))
            if gate in given and (of == "exps" or name == "granitehybrid"):
                both = np.concatenate((given.pop(gate), given.pop(up)), axis=-2)
                given[f"blk.{layer}.ffn_gate_up_{of}.weight"] = both
    for full, drawn in given.items():
        if full == "rope_freqs.weight":
            continue
        if not full.startswith("blk."):
            top = _TOP[full.removesuffix(".weight")] + ".weight"
            if name.startswith("nemotron"):
                top = top.replace("embed_tokens", "embeddings").replace(
                    "model.norm", "model.norm_f"
                )
            found[top] = drawn - 1 if delta and "norm" in full else drawn
            continue
        _, layer_name, tensor = full.split(".", 2)
        values = _delta_order(tensor, drawn) if delta else drawn
        if tensor == "ssm_a":
            values = np.log(-values)
        short = tensor.removesuffix(".weight")
        if "_exps" in short and tensor not in names:
            theirs = f"{names['experts']}.{short.removesuffix('_exps').removeprefix('ffn_')}_proj"
        elif tensor in names:  # no weight: a vector of its own
            theirs = names[tensor]
        else:
            end = ".bias" if tensor.endswith(".bias") else ".weight"
            theirs = names[short.removesuffix(".bias")] + end
        theirs = theirs.removesuffix(".weight") if theirs.endswith("scalar.weight") else theirs
        found[f"model.layers.{layer_name}.{theirs}"] = values
    return found


def logits(name: str) -> Values:
    """Return transformers' logits of the prompt at POSITIONS: (positions, vocabulary)."""
    import torch  # type: ignore[import-not-found,unused-ignore]

    model, names = FAMILIES[name](name)
    model = model.double().eval()
    theirs, state = _theirs(name, names), model.state_dict()
    assert set(theirs) == set(state), (set(theirs) ^ set(state),)
    for key, values in theirs.items():
        state[key] = torch.tensor(values.astype(np.float64)).reshape(state[key].shape)
    model.load_state_dict(state)
    with torch.no_grad():
        found = model(torch.tensor([list(PROMPT)])).logits[0].numpy()
    wanted: Values = found[list(POSITIONS)]
    return wanted


def main() -> None:
    """Write the file."""
    found = {name: np.round(logits(name), 5).tolist() for name in MODELS}
    text = json.dumps(found, separators=(",", ":"))
    GOLDEN.write_text(text.replace("]],", "]],\n").replace("],[", "],\n[") + "\n")


if __name__ == "__main__":
    main()
