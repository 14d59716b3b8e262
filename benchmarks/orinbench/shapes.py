"""Named model shapes and quantization recipes that synthetic models are made of."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType

from orinbench.errors import BenchError

Keys = Mapping[str, int | float | bool | str | list[int] | list[bool]]


class Draw(Enum):
    """Distribution of a tensor's values; all but matrices are F32."""

    MATRIX = "matrix"  # around 0, in the type that is wanted
    NORM = "norm"  # near 1
    BIAS = "bias"  # near 0
    SINK = "sink"  # around 0, as wide as scores are
    ROUTER = "router"  # weights wide enough that experts differ
    FACTORS = "factors"  # what rotary frequencies are divided by: 1 and above
    TAPS = "taps"  # of a short convolution
    DECAY = "decay"  # of a state: below 0
    ROOT = "root"  # near the root of the width
    QUERY = "query"  # near 1 / the root of a head's size, where scores have no such scale


Tensor = tuple[str, tuple[int, ...], Draw]


@dataclass(frozen=True)
class Shape:
    """Dimensions of a model; widths are numbers of weights."""

    n_layers: int
    n_embd: int
    n_ff: int  # of one expert where there are experts
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    tied: bool  # the token embedding is the output head too
    # Narrow models get wider weights, so that attention is as peaked and as sensitive to a wrong
    # position as at 2048 and 0.02.
    weight_std: float = 0.02
    norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    architecture: str = "llama"
    n_rot: int = 0  # dimensions of a head that turn; 0: all
    n_experts: int = 0
    n_experts_used: int = 0
    # Keys of the architecture beside the sizes, such as attention.sliding_window.
    metadata: Keys = field(default_factory=dict)
    rope_tensors: tuple[str, ...] = ()  # tensors of factors for the rotary frequencies
    attends: tuple[int, ...] | None = None  # layers with attention, others recur; None: all attend

    def tensors(self) -> list[Tensor]:
        """Return name, shape (rows first) and draw of each tensor, in the file's order.

        Stacked experts have three sizes: (experts, rows, columns).
        """
        head, norm = (self.vocab_size, self.n_embd), (self.n_embd,)
        found: list[Tensor] = [("token_embd.weight", head, Draw.MATRIX)]
        for layer in range(self.n_blocks):
            parts = *self._mixer(layer), *self._feed_forward(), *self._proposing(layer)
            for name, dims, draw in parts:
                found.append((f"blk.{layer}.{name}", dims, draw))
        found += [] if self.tied else [("output.weight", head, Draw.MATRIX)]
        last = "token_embd_norm" if self.architecture == "lfm2" else "output_norm"
        found.append((f"{last}.weight", norm, Draw.NORM))
        pairs = ((self.n_rot or self.head_dim) // 2,)
        found += [(name, pairs, Draw.FACTORS) for name in self.rope_tensors]
        return sorted(found, key=lambda tensor: tensor[2] != Draw.MATRIX)

    @property
    def n_blocks(self) -> int:
        """Layers, and the blocks behind them that propose later tokens (MTP)."""
        proposing = self.metadata.get("nextn_predict_layers", 0)
        assert isinstance(proposing, int)
        return self.n_layers + proposing

    @property
    def head_count_kv(self) -> int | list[int]:
        """The file's key: a number, or one a layer where only it says which layers attend."""
        if self.architecture != "lfm2" or self.attends is None:
            return self.n_kv_heads
        return [self.n_kv_heads * (layer in self.attends) for layer in range(self.n_layers)]

    def _mixer(self, layer: int) -> Iterator[Tensor]:
        if self.attends is None or layer in self.attends or layer >= self.n_layers:
            yield from self._attention()
        elif self.architecture == "lfm2":
            yield from self._short_convolution()
        else:
            yield from self._delta_net()

    def _short_convolution(self) -> Iterator[Tensor]:
        yield "shortconv.in_proj.weight", (3 * self.n_embd, self.n_embd), Draw.MATRIX
        yield "shortconv.out_proj.weight", (self.n_embd, self.n_embd), Draw.MATRIX
        yield "shortconv.conv.weight", (self.n_embd, self._size("shortconv.l_cache")), Draw.TAPS
        yield "attn_norm.weight", (self.n_embd,), Draw.NORM

    def _delta_net(self) -> Iterator[Tensor]:
        inner, heads = self._size("ssm.inner_size"), self._size("ssm.time_step_rank")
        rows = inner + 2 * self._size("ssm.group_count") * self._size("ssm.state_size")
        yield "attn_qkv.weight", (rows, self.n_embd), Draw.MATRIX
        yield "attn_gate.weight", (inner, self.n_embd), Draw.MATRIX
        yield "ssm_out.weight", (self.n_embd, inner), Draw.MATRIX
        yield "ssm_conv1d.weight", (rows, self._size("ssm.conv_kernel")), Draw.TAPS
        yield "ssm_dt.bias", (heads,), Draw.BIAS
        yield "ssm_a", (heads,), Draw.DECAY
        yield "ssm_alpha.weight", (heads, self.n_embd), Draw.ROUTER
        yield "ssm_beta.weight", (heads, self.n_embd), Draw.ROUTER
        yield "ssm_norm.weight", (inner // heads,), Draw.NORM
        yield "attn_norm.weight", (self.n_embd,), Draw.NORM
        yield "post_attention_norm.weight", (self.n_embd,), Draw.NORM

    def _size(self, key: str) -> int:
        size = self.metadata[key]
        assert isinstance(size, int)
        return size

    def _attention(self) -> Iterator[Tensor]:
        q_rows, kv_rows = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        if self.architecture == "phi3":
            yield "attn_qkv.weight", (q_rows + 2 * kv_rows, self.n_embd), Draw.MATRIX
        else:
            for name, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
                gated = name == "q" and self.architecture == "qwen35"  # each head has its gate
                yield f"attn_{name}.weight", ((1 + gated) * rows, self.n_embd), Draw.MATRIX
                if self.architecture in ("qwen2", "gpt-oss"):
                    yield f"attn_{name}.bias", (rows,), Draw.BIAS
        yield "attn_output.weight", (self.n_embd, q_rows), Draw.MATRIX
        yield "attn_norm.weight", (self.n_embd,), Draw.NORM
        if self.architecture in ("gemma2", "gemma3", "gemma4", "gpt-oss", "qwen35"):
            yield "post_attention_norm.weight", (self.n_embd,), Draw.NORM
        if self.architecture in _NORMED_HEADS:
            draw = Draw.QUERY if self.architecture == "gemma4" else Draw.NORM
            yield "attn_q_norm.weight", (self.head_dim,), draw
            yield "attn_k_norm.weight", (self.head_dim,), Draw.NORM
        if self.architecture == "gpt-oss":
            yield "attn_sinks.weight", (self.n_heads,), Draw.SINK
            yield "attn_output.bias", (self.n_embd,), Draw.BIAS

    def _feed_forward(self) -> Iterator[Tensor]:
        if self.architecture == "gemma4":
            yield from self._dense_and_experts()
            return
        stack = (self.n_experts,) if self.n_experts else ()
        suffix = "_exps" if self.n_experts else ""
        parts = [("gate", self.n_ff), ("up", self.n_ff), ("down", self.n_embd)]
        if self.architecture == "phi3":
            parts = [("up", 2 * self.n_ff), ("down", self.n_embd)]
        for name, rows in parts:
            columns = self.n_ff if name == "down" else self.n_embd
            yield f"ffn_{name}{suffix}.weight", (*stack, rows, columns), Draw.MATRIX
            if self.architecture == "gpt-oss":
                yield f"ffn_{name}_exps.bias", (self.n_experts, rows), Draw.BIAS
        if self.architecture not in ("gpt-oss", "qwen35"):
            yield "ffn_norm.weight", (self.n_embd,), Draw.NORM
        if self.architecture in ("gemma2", "gemma3"):
            yield "post_ffw_norm.weight", (self.n_embd,), Draw.NORM
        if self.n_experts:
            yield "ffn_gate_inp.weight", (self.n_experts, self.n_embd), Draw.ROUTER
        if self.architecture == "gpt-oss":
            yield "ffn_gate_inp.bias", (self.n_experts,), Draw.BIAS

    def _proposing(self, layer: int) -> Iterator[Tensor]:
        if layer >= self.n_layers:
            yield "nextn.eh_proj.weight", (self.n_embd, 2 * self.n_embd), Draw.MATRIX
            for name in ("enorm", "hnorm", "shared_head_norm"):
                yield f"nextn.{name}.weight", (self.n_embd,), Draw.NORM

    def _dense_and_experts(self) -> Iterator[Tensor]:
        wide, count = (2 * self.n_ff, self.n_embd), self.n_experts
        yield "ffn_gate.weight", (self.n_ff, self.n_embd), Draw.MATRIX
        yield "ffn_up.weight", (self.n_ff, self.n_embd), Draw.MATRIX
        yield "ffn_down.weight", (self.n_embd, self.n_ff), Draw.MATRIX
        yield "ffn_gate_up_exps.weight", (count, *wide), Draw.MATRIX
        yield "ffn_down_exps.weight", (count, self.n_embd, self.n_ff), Draw.MATRIX
        yield "ffn_gate_inp.weight", (count, self.n_embd), Draw.ROUTER
        yield "ffn_gate_inp.scale", (self.n_embd,), Draw.ROOT
        yield "ffn_down_exps.scale", (count,), Draw.NORM
        yield "layer_output_scale.weight", (1,), Draw.NORM
        for name in (
            "ffn_norm",
            "pre_ffw_norm_2",
            *(f"post_ffw_norm{n}" for n in ("", "_1", "_2")),
        ):
            yield f"{name}.weight", (self.n_embd,), Draw.NORM


_NORMED_HEADS = ("qwen3", "qwen3moe", "qwen3vl", "gemma3", "gemma4", "qwen35", "lfm2")
_LONGROPE = ("rope_factors_long.weight", "rope_factors_short.weight")
_GEMMA: Keys = {"attention.sliding_window": 24, "rope.freq_base_swa": 10000.0}
_YARN: Keys = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 32.0,
    "rope.scaling.original_context_length": 4096,
}
# Qwen3.5 4B's: three layers of four recur. Its text turns by three positions, which are one.
_QWEN35: Keys = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 128,
    "ssm.group_count": 16,
    "ssm.time_step_rank": 32,
    "ssm.inner_size": 4096,
    "full_attention_interval": 4,
    "rope.dimension_sections": [11, 11, 10, 0],
}
_TINY = Shape(2, 256, 512, 4, 2, 64, 1024, 512, tied=True, weight_std=0.06)


def _tiny(architecture: str, **changes: Any) -> Shape:
    """Return a variant of the tiny shape: another network of nearly the same sizes."""
    return replace(_TINY, architecture=architecture, **changes)


# 1b, 3b and 8b are the shapes of Llama 3.2 1B, Llama 3.2 3B and Llama 3 8B; 160m is that of
# JackFram/llama-160m with grouped queries. A context of 8192 is Llama 3's, without RoPE scaling.
# 0.5b is Qwen2.5-0.5B, phi4-mini Phi-4-mini; lfm2-1.2b LFM2-1.2B, qwen35-4b
# Qwen3.5-4B; gpt-oss-20b-8 and qwen3-30b-a3b-8 are the first 8 of
# their 24 and 48 layers. The tiny ones are for tests: one a family, windows and original contexts
# so short that a short prompt crosses them.
SHAPES = {
    "tiny": _TINY,
    "tiny-llama3": _tiny("llama", rope_tensors=("rope_freqs.weight",)),
    "tiny-qwen2": _tiny("qwen2", rope_theta=1e6, norm_eps=1e-6),
    "tiny-qwen3": _tiny("qwen3", head_dim=128, rope_theta=1e6, norm_eps=1e-6, tied=False),
    "tiny-qwen3vl": _tiny("qwen3vl", rope_theta=5e6, norm_eps=1e-6),
    "tiny-qwen3moe": _tiny(
        "qwen3moe", n_heads=8, n_kv_heads=1, n_ff=256, n_experts=16, n_experts_used=4
    ),
    "tiny-mixtral": _tiny("llama", n_experts=8, n_experts_used=2, tied=False, rope_theta=1e6),
    "tiny-mistral3": _tiny(
        "mistral3",
        rope_theta=1e6,
        metadata={
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 16.0,
            "rope.scaling.original_context_length": 24,
            "rope.scaling.yarn_log_multiplier": 1.0,
            "attention.temperature_scale": 0.25,
        },
    ),
    "tiny-smollm3": _tiny("smollm3", n_layers=5),
    "tiny-granite": _tiny(
        "granite",
        rope_theta=10000.0,
        metadata={
            "attention.scale": 0.05,
            "embedding_scale": 6.0,
            "residual_scale": 0.5,
            "logit_scale": 4.0,
        },
    ),
    "tiny-granitemoe": _tiny(
        "granitemoe",
        n_ff=256,
        n_experts=8,
        n_experts_used=3,
        metadata={"attention.scale": 0.05, "embedding_scale": 6.0, "logit_scale": 4.0},
    ),
    "tiny-gemma3": _tiny(
        "gemma3",
        n_layers=7,
        n_kv_heads=1,
        rope_theta=1e6,
        norm_eps=1e-6,
        metadata={**_GEMMA, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
    ),
    "tiny-gemma4": _tiny(
        "gemma4",
        n_layers=4,
        n_ff=256,
        n_experts=8,
        n_experts_used=3,
        rope_theta=1e6,
        norm_eps=1e-6,
        rope_tensors=("rope_freqs.weight",),
        metadata={
            **_GEMMA,
            "attention.sliding_window_pattern": [True, True, False, True],
            "attention.key_length_swa": 64,
            "attention.value_length_swa": 64,
            "rope.dimension_count_swa": 64,
            "embedding_length_per_layer_input": 0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "tiny-gemma2": _tiny(
        "gemma2",
        n_layers=4,
        norm_eps=1e-6,
        rope_theta=10000.0,
        metadata={
            "attention.sliding_window": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "tiny-phi3": _tiny(
        "phi3",
        n_rot=48,
        rope_theta=10000.0,
        rope_tensors=_LONGROPE,
        metadata={
            "rope.scaling.original_context_length": 256,
            "rope.scaling.attn_factor": 1.1902,
            "attention.sliding_window": 100,
        },
    ),
    "tiny-yarn": _tiny(
        "qwen2",
        rope_theta=10000.0,
        metadata={**_YARN, "rope.scaling.original_context_length": 64, "rope.scaling.factor": 4.0},
    ),
    "tiny-gptoss": _tiny(
        "gpt-oss",
        n_layers=4,
        n_heads=8,
        n_ff=256,
        n_experts=8,
        n_experts_used=3,
        rope_theta=150000.0,
        tied=False,
        metadata={
            **_YARN,
            "rope.scaling.original_context_length": 64,
            "attention.sliding_window": 24,
        },
    ),
    "tiny-qwen35": _tiny(
        "qwen35",
        n_layers=4,
        n_rot=32,
        head_dim=128,
        rope_theta=1e7,
        norm_eps=1e-6,
        attends=(3,),
        metadata={
            **_QWEN35,
            "ssm.state_size": 64,
            "ssm.group_count": 2,
            "ssm.time_step_rank": 4,
            "ssm.inner_size": 256,
            "rope.dimension_sections": [6, 5, 5, 0],
        },
    ),
    "tiny-lfm2": _tiny(
        "lfm2",
        n_layers=3,
        rope_theta=1e6,
        attends=(1,),
        metadata={"shortconv.l_cache": 3},
    ),
    "160m": Shape(12, 768, 3072, 12, 4, 64, 32000, 2048, tied=False, weight_std=0.03),
    "0.5b": Shape(
        *(24, 896, 4864, 14, 2, 64, 151936, 32768),
        tied=True,
        norm_eps=1e-6,
        rope_theta=1e6,
        architecture="qwen2",
    ),
    "1b": Shape(16, 2048, 8192, 32, 8, 64, 128256, 8192, tied=True),
    "3b": Shape(28, 3072, 8192, 24, 8, 128, 128256, 8192, tied=True),
    "qwen3-4b": Shape(
        *(36, 2560, 9728, 32, 8, 128, 151936, 40960),
        tied=True,
        norm_eps=1e-6,
        rope_theta=1e6,
        architecture="qwen3",
    ),
    "gemma3-4b": Shape(
        *(34, 2560, 10240, 8, 4, 256, 262144, 131072),
        tied=True,
        norm_eps=1e-6,
        rope_theta=1e6,
        architecture="gemma3",
        metadata={
            **_GEMMA,
            "attention.sliding_window": 1024,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
    ),
    "phi4-mini": Shape(
        *(32, 3072, 8192, 24, 8, 128, 200064, 131072),
        tied=True,
        rope_theta=10000.0,
        architecture="phi3",
        n_rot=96,
        rope_tensors=_LONGROPE,
        metadata={
            "rope.scaling.original_context_length": 4096,
            "rope.scaling.attn_factor": 1.1902380714238083,
        },
    ),
    "lfm2-1.2b": Shape(
        *(16, 2048, 8192, 32, 8, 64, 65536, 128000),
        tied=True,
        rope_theta=1e6,
        architecture="lfm2",
        attends=(2, 5, 8, 10, 12, 14),
        metadata={"shortconv.l_cache": 3},
    ),
    "qwen35-4b": Shape(
        *(32, 2560, 9216, 16, 4, 256, 248320, 262144),
        tied=True,
        n_rot=64,
        norm_eps=1e-6,
        rope_theta=1e7,
        architecture="qwen35",
        attends=tuple(range(3, 32, 4)),
        metadata=_QWEN35,
    ),
    "8b": Shape(32, 4096, 14336, 32, 8, 128, 128256, 8192, tied=False),
    "gpt-oss-20b-8": Shape(
        *(8, 2880, 2880, 64, 8, 64, 201088, 131072),
        tied=False,
        rope_theta=150000.0,
        architecture="gpt-oss",
        n_experts=32,
        n_experts_used=4,
        metadata={**_YARN, "attention.sliding_window": 128},
    ),
    "qwen3-30b-a3b-8": Shape(
        *(8, 2048, 768, 32, 4, 128, 151936, 40960),
        tied=False,
        norm_eps=1e-6,
        rope_theta=1e6,
        architecture="qwen3moe",
        n_experts=128,
        n_experts_used=8,
    ),
}
# With the block that proposes tokens which Qwen3.5's files may have.
_proposing = {**SHAPES["tiny-qwen35"].metadata, "nextn_predict_layers": 1}
SHAPES["tiny-qwen35-mtp"] = replace(SHAPES["tiny-qwen35"], metadata=_proposing)


@dataclass(frozen=True)
class Quant:
    """Each matrix's type, and the file type that names the mixture."""

    file_type: LlamaFileType
    type_of: Callable[[str, Shape], GGMLQuantizationType]

    def fitting(self, name: str, shape: Shape, columns: int) -> GGMLQuantizationType:
        """Return the type of a matrix whose rows have `columns` weights.

        As llama-quantize, which falls back where a row is no multiple of a type's block.
        """
        tensor_type = self.type_of(name, shape)
        if columns % GGML_QUANT_SIZES[tensor_type][0]:
            return _FALLBACKS[tensor_type]
        return tensor_type


_T = GGMLQuantizationType
# llama-quant.cpp of llama.cpp 0.5.0, lines 396 to 440.
_FALLBACKS = {
    _T.Q2_K: _T.Q4_0,
    _T.Q3_K: _T.Q4_0,
    _T.Q4_K: _T.Q5_0,
    _T.Q5_K: _T.Q5_1,
    _T.Q6_K: _T.Q8_0,
    _T.IQ4_XS: _T.IQ4_NL,
}


def _uniform(name: str, file_type: str) -> Quant:
    tensor_type = GGMLQuantizationType[name]
    return Quant(LlamaFileType[file_type], lambda _name, _shape: tensor_type)


def _medium(low: GGMLQuantizationType, file_type: LlamaFileType) -> Quant:
    """Return llama-quantize's Q4_K_M and Q5_K_M: Q6_K for the head, half of attn_v and ffn_down."""

    def type_of(name: str, shape: Shape) -> GGMLQuantizationType:
        if name == "output.weight" or (name == "token_embd.weight" and shape.tied):
            return GGMLQuantizationType.Q6_K
        if name.endswith(("attn_v.weight", "ffn_down.weight")):
            layer, n = int(name.split(".")[1]), shape.n_layers
            if layer < n // 8 or layer >= 7 * n // 8 or (layer - n // 8) % 3 == 2:
                return GGMLQuantizationType.Q6_K
        return low

    return Quant(file_type, type_of)


def _experts_mxfp4(name: str, shape: Shape) -> GGMLQuantizationType:
    """Return MXFP4 for stacked experts; for all matrices of a model that has none."""
    return _T.MXFP4 if "_exps." in name or not shape.n_experts else _T.Q8_0


_PLAIN = "F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q6_K IQ4_NL IQ4_XS".split()
_SMALL = "Q2_K Q3_K Q4_K Q5_K".split()
QUANTS = {
    "F32": _uniform("F32", "ALL_F32"),
    **{name: _uniform(name, f"MOSTLY_{name}") for name in _PLAIN},
    **{name: _uniform(name, f"MOSTLY_{name}_S") for name in _SMALL},
    "Q4_K_M": _medium(GGMLQuantizationType.Q4_K, LlamaFileType.MOSTLY_Q4_K_M),
    "Q5_K_M": _medium(GGMLQuantizationType.Q5_K, LlamaFileType.MOSTLY_Q5_K_M),
    "MXFP4": Quant(LlamaFileType.MOSTLY_MXFP4_MOE, _experts_mxfp4),
}


def shape_named(name: str) -> Shape:
    """Return the shape called `name`; raises BenchError, listing the shapes, if there is none."""
    if name not in SHAPES:
        raise BenchError(f"--shape {name}: no such shape; there are {', '.join(SHAPES)}")
    return SHAPES[name]


def quant_named(name: str) -> Quant:
    """Return the recipe called `name`; raises BenchError, listing them, if there is none."""
    if name not in QUANTS:
        raise BenchError(f"--quant {name}: no such type; there are {', '.join(QUANTS)}")
    return QUANTS[name]
