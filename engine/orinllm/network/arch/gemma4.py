"""gemma4, text only. Source: src/models/gemma4.cpp of llama.cpp 0.5.0."""

from dataclasses import replace

from orinllm.errors import BadInput
from orinllm.network.arch.decoder import (
    FeedForward,
    config_of_layers,
    layer_attentions,
    read_experts,
    read_head_counts,
    read_windows,
)
from orinllm.network.arch.header import Header
from orinllm.network.arch.rope import read_rope
from orinllm.network.config import LAYERS, Config
from orinllm.network.layer import (
    Activate,
    Activation,
    AddMergedNorms,
    AddToResidual,
    Attend,
    Attention,
    Gating,
    Layer,
    Linear,
    MixExperts,
    Norm,
    Operation,
    Rope,
    ScaleResidual,
    X,
)


def gemma4_config(header: Header) -> Config:
    """Return the Config of a Gemma 4: embeddings by layer, and layers that share caches."""
    each = header.whole_number("embedding_length_per_layer_input", 0, least=0)
    dim, hidden = (
        header.whole_number("embedding_length"),
        header.whole_numbers_by_layer("feed_forward_length"),
    )
    attended = _layer_attentions(header)

    def layer(index: int) -> Layer:
        scaled = f"blk.{index}.layer_output_scale.weight" in header.tensors
        return Layer(
            (
                Norm("normed", X, "attn_norm"),
                *_attention_operations(header, index, attended[index], dim),
                *_norm_add_ops("out", "post_attention_norm"),
                Norm("normed", X, "ffn_norm"),
                *_feed_forward_operations(header, index, hidden[index], dim),
                *(_layer_embedding_operations(index, each, dim) if each else ()),
                *((ScaleResidual("layer_output_scale"),) if scaled else ()),
            )
        )

    config = config_of_layers(header, tuple(layer(index) for index in range(header.n_layers)))
    cap = header.number("final_logit_softcapping", 0.0)
    return replace(config, embedding_scale=dim**0.5, logit_softcap=cap, layer_embedding=each)


def _norm_add_ops(of: str, norm: str) -> tuple[Operation, ...]:
    return (Norm(f"{of}_normed", of, norm), AddToResidual(f"{of}_normed"))


def _feed_forward_operations(
    header: Header, index: int, hidden: int, dim: int
) -> tuple[Operation, ...]:
    """Return the dense part, with the experts beside it where the layer has some."""
    dense, prefix = FeedForward(Activation.GELU, hidden), f"blk.{index}."
    if f"{prefix}ffn_gate_inp.weight" not in header.tensors:
        return dense.operations("normed", dim, lambda of, by: _norm_add_ops(of, "post_ffw_norm"))
    width = header.whole_numbers_by_layer("expert_feed_forward_length")[index]
    experts = replace(
        read_experts(header, width, Gating.SOFTMAX, normalized=True),
        reads_x=True,
        scaled=f"{prefix}ffn_down_exps.scale" in header.tensors,
    )
    return (
        *dense.operations("normed", dim, lambda of, by: ()),
        Norm("normed_again", X, "pre_ffw_norm_2"),
        MixExperts("mixed", "normed_again", experts, Activation.GELU),
        AddMergedNorms(("down", "mixed"), ("post_ffw_norm_1", "post_ffw_norm_2"), "post_ffw_norm"),
    )


def _layer_embedding_operations(index: int, each: int, dim: int) -> tuple[Operation, ...]:
    """Return how a layer's own embedding of the token comes in."""
    return (
        Linear("chosen", X, (("inp_gate", each),)),
        Activate("gated", "chosen", Activation.GELU, by=LAYERS, first=index * each),
        Linear("layered", "gated", (("proj", dim),)),
        *_norm_add_ops("layered", "post_norm"),
    )


def _attention_operations(
    header: Header, index: int, attention: Attention, dim: int
) -> tuple[Operation, ...]:
    # Keys are the values, too, where a layer has no matrix for these.
    whole = any(f"blk.{index}.attn_{name}.weight" in header.tensors for name in ("v", "qkv"))
    value = "attn_v" if whole else "attn_k"
    kv = attention.kv_width
    own = (("attn_k", kv), (value, kv)) if attention.reads is None else ()
    return (
        Linear("qkv", "normed", (("attn_q", attention.q_width), *own)),
        Attend("attended", "qkv", attention),
        Linear("out", "attended", (("attn_output", dim),)),
    )


def _layer_attentions(header: Header) -> list[Attention]:
    """Return the attention of each layer: near ones have windows, and heads of their own size."""
    header.value_or_raise("attention.sliding_window_pattern")  # has no default
    windows, heads = read_windows(header, 0), read_head_counts(header)
    near_size = header.whole_number("attention.key_length_swa", heads.head_dim)
    shared = header.whole_number("attention.shared_kv_layers", 0, least=0)
    own = header.n_layers - shared
    near, far = (
        _window_rope(header, near_size),
        read_rope(header, heads.head_dim, interleaved=False),
    )
    alike = layer_attentions(heads, far, windows, near, scale=1.0, qk_norm=True, v_norm=True)
    found = [
        replace(one, head_dim=near_size if one.window else heads.head_dim) for one in alike[:own]
    ]
    for index, one in enumerate(alike[own:], own):
        read = [i for i, other in enumerate(found[:own]) if bool(other.window) == bool(one.window)]
        if not read:
            raise BadInput(
                f"{header.architecture}.attention.shared_kv_layers is {shared}: layer {index} has "
                "no layer of its kind before them whose keys it could read"
            )
        found.append(replace(one, head_dim=found[read[-1]].head_dim, reads=read[-1]))
    return found


def _window_rope(header: Header, size: int) -> Rope:
    """Return the positions of layers with a window, which rope_freqs does not change."""
    turned = header.whole_number("rope.dimension_count_swa", size)
    if turned % 2 or turned > size:
        raise BadInput(
            f"{header.architecture}.rope.dimension_count_swa is {turned}; "
            f"an even number up to the head's {size} was expected"
        )
    base = header.positive_number("rope.freq_base_swa", 10000.0)
    return Rope(tuple(base ** (-pair / turned) for pair in range(0, turned, 2)), False)
