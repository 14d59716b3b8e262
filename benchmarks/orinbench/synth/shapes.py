"""Named model shapes and quantization recipes that synthetic models are made of."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType

from orinbench.errors import BenchError

Keys = Mapping[str, int | float | bool | str | list[int] | list[bool]]


class WeightDraw(Enum):
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


Tensor = tuple[str, tuple[int, ...], WeightDraw]


@dataclass(frozen=True)
class ModelShape:
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
        found: list[Tensor] = [("token_embd.weight", head, WeightDraw.MATRIX)]
        for layer in range(self.n_blocks):
            parts = (
                *self._mixer_tensors(layer),
                *self._feed_forward_tensors(),
                *self._mtp_tensors(layer),
            )
            for name, dims, draw in parts:
                found.append((f"blk.{layer}.{name}", dims, draw))
        found += [] if self.tied else [("output.weight", head, WeightDraw.MATRIX)]
        last = "token_embd_norm" if self.architecture == "lfm2" else "output_norm"
        found.append((f"{last}.weight", norm, WeightDraw.NORM))
        pairs = ((self.n_rot or self.head_dim) // 2,)
        found += [(name, pairs, WeightDraw.FACTORS) for name in self.rope_tensors]
        return sorted(found, key=lambda tensor: tensor[2] != WeightDraw.MATRIX)

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

    def _mixer_tensors(self, layer: int) -> Iterator[Tensor]:
        if self.attends is None or layer in self.attends or layer >= self.n_layers:
            yield from self._attention_tensors()
        elif self.architecture == "lfm2":
            yield from self._short_convolution_tensors()
        else:
            yield from self._delta_net_tensors()

    def _short_convolution_tensors(self) -> Iterator[Tensor]:
        yield "shortconv.in_proj.weight", (3 * self.n_embd, self.n_embd), WeightDraw.MATRIX
        yield "shortconv.out_proj.weight", (self.n_embd, self.n_embd), WeightDraw.MATRIX
        yield (
            "shortconv.conv.weight",
            (self.n_embd, self._metadata_int("shortconv.l_cache")),
            WeightDraw.TAPS,
        )
        yield "attn_norm.weight", (self.n_embd,), WeightDraw.NORM

    def _delta_net_tensors(self) -> Iterator[Tensor]:
        inner, heads = (
            self._metadata_int("ssm.inner_size"),
            self._metadata_int("ssm.time_step_rank"),
        )
        rows = inner + 2 * self._metadata_int("ssm.group_count") * self._metadata_int(
            "ssm.state_size"
        )
        yield "attn_qkv.weight", (rows, self.n_embd), WeightDraw.MATRIX
        yield "attn_gate.weight", (inner, self.n_embd), WeightDraw.MATRIX
        yield "ssm_out.weight", (self.n_embd, inner), WeightDraw.MATRIX
        yield "ssm_conv1d.weight", (rows, self._metadata_int("ssm.conv_kernel")), WeightDraw.TAPS
        yield "ssm_dt.bias", (heads,), WeightDraw.BIAS
        yield "ssm_a", (heads,), WeightDraw.DECAY
        yield "ssm_alpha.weight", (heads, self.n_embd), WeightDraw.ROUTER
        yield "ssm_beta.weight", (heads, self.n_embd), WeightDraw.ROUTER
        yield "ssm_norm.weight", (inner // heads,), WeightDraw.NORM
        yield "attn_norm.weight", (self.n_embd,), WeightDraw.NORM
        yield "post_attention_norm.weight", (self.n_embd,), WeightDraw.NORM

    def _metadata_int(self, key: str) -> int:
        size = self.metadata[key]
        assert isinstance(size, int)
        return size

    def _attention_tensors(self) -> Iterator[Tensor]:
        q_rows, kv_rows = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        if self.architecture == "phi3":
            yield "attn_qkv.weight", (q_rows + 2 * kv_rows, self.n_embd), WeightDraw.MATRIX
        else:
            for name, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
                gated = name == "q" and self.architecture == "qwen35"  # each head has its gate
                yield f"attn_{name}.weight", ((1 + gated) * rows, self.n_embd), WeightDraw.MATRIX
                if self.architecture in ("qwen2", "gpt-oss"):
                    yield f"attn_{name}.bias", (rows,), WeightDraw.BIAS
        yield "attn_output.weight", (self.n_embd, q_rows), WeightDraw.MATRIX
        yield "attn_norm.weight", (self.n_embd,), WeightDraw.NORM
        if self.architecture in ("gemma2", "gemma3", "gemma4", "gpt-oss", "qwen35"):
            yield "post_attention_norm.weight", (self.n_embd,), WeightDraw.NORM
        if self.architecture in _NORMED_HEADS:
            draw = WeightDraw.QUERY if self.architecture == "gemma4" else WeightDraw.NORM
            yield "attn_q_norm.weight", (self.head_dim,), draw
            yield "attn_k_norm.weight", (self.head_dim,), WeightDraw.NORM
        if self.architecture == "gpt-oss":
            yield "attn_sinks.weight", (self.n_heads,), WeightDraw.SINK
            yield "attn_output.bias", (self.n_embd,), WeightDraw.BIAS

    def _feed_forward_tensors(self) -> Iterator[Tensor]:
        if self.architecture == "gemma4":
            yield from self._gemma4_feed_forward_tensors()
            return
        stack = (self.n_experts,) if self.n_experts else ()
        suffix = "_exps" if self.n_experts else ""
        parts = [("gate", self.n_ff), ("up", self.n_ff), ("down", self.n_embd)]
        if self.architecture == "phi3":
            parts = [("up", 2 * self.n_ff), ("down", self.n_embd)]
        for name, rows in parts:
            columns = self.n_ff if name == "down" else self.n_embd
            yield f"ffn_{name}{suffix}.weight", (*stack, rows, columns), WeightDraw.MATRIX
            if self.architecture == "gpt-oss":
                yield f"ffn_{name}_exps.bias", (self.n_experts, rows), WeightDraw.BIAS
        if self.architecture not in ("gpt-oss", "qwen35"):
            yield "ffn_norm.weight", (self.n_embd,), WeightDraw.NORM
        if self.architecture in ("gemma2", "gemma3"):
            yield "post_ffw_norm.weight", (self.n_embd,), WeightDraw.NORM
        if self.n_experts:
            yield "ffn_gate_inp.weight", (self.n_experts, self.n_embd), WeightDraw.ROUTER
        if self.architecture == "gpt-oss":
            yield "ffn_gate_inp.bias", (self.n_experts,), WeightDraw.BIAS

    def _mtp_tensors(self, layer: int) -> Iterator[Tensor]:
        if layer >= self.n_layers:
            yield "nextn.eh_proj.weight", (self.n_embd, 2 * self.n_embd), WeightDraw.MATRIX
            for name in ("enorm", "hnorm", "shared_head_norm"):
                yield f"nextn.{name}.weight", (self.n_embd,), WeightDraw.NORM

    def _gemma4_feed_forward_tensors(self) -> Iterator[Tensor]:
        wide, count = (2 * self.n_ff, self.n_embd), self.n_experts
        yield "ffn_gate.weight", (self.n_ff, self.n_embd), WeightDraw.MATRIX
        yield "ffn_up.weight", (self.n_ff, self.n_embd), WeightDraw.MATRIX
        yield "ffn_down.weight", (self.n_embd, self.n_ff), WeightDraw.MATRIX
        yield "ffn_gate_up_exps.weight", (count, *wide), WeightDraw.MATRIX
        yield "ffn_down_exps.weight", (count, self.n_embd, self.n_ff), WeightDraw.MATRIX
        yield "ffn_gate_inp.weight", (count, self.n_embd), WeightDraw.ROUTER
        yield "ffn_gate_inp.scale", (self.n_embd,), WeightDraw.ROOT
        yield "ffn_down_exps.scale", (count,), WeightDraw.NORM
        yield "layer_output_scale.weight", (1,), WeightDraw.NORM
        for name in (
            "ffn_norm",
            "pre_ffw_norm_2",
            *(f"post_ffw_norm{n}" for n in ("", "_1", "_2")),
        ):
            yield f"{name}.weight", (self.n_embd,), WeightDraw.NORM


_NORMED_HEADS = ("qwen3", "qwen3moe", "qwen3vl", "gemma3", "gemma4", "qwen35", "lfm2")


def _read_shapes() -> dict[str, ModelShape]:
    """Return the shapes of shapes.json by name.

    1b, 3b and 8b are those of Llama 3.2 1B, Llama 3.2 3B and Llama 3 8B; 160m is that of
    JackFram/llama-160m with grouped queries. A context of 8192 is Llama 3's, without RoPE scaling.
    0.5b is Qwen2.5-0.5B; gpt-oss-20b-8 and qwen3-30b-a3b-8 are the first 8 of their 24 and 48
    layers. The tiny ones are for tests: one a family, windows and original contexts so short that a
    short prompt crosses them. `like` names one from which others differ by a few fields.
    """
    found: dict[str, ModelShape] = {}
    raw = json.loads(Path(__file__).with_name("shapes.json").read_text(encoding="utf-8"))
    for name, given in raw.items():
        kin = vars(found[given.pop("like")]) if "like" in given else {"metadata": {}}
        given["metadata"] = {**kin["metadata"], **given.get("metadata", {})}
        lists = {key: tuple(given[key]) for key in ("rope_tensors", "attends") if key in given}
        found[name] = ModelShape(**{**kin, **given, **lists})
    return found


SHAPES = _read_shapes()


@dataclass(frozen=True)
class QuantRecipe:
    """Each matrix's type, and the file type that names the mixture."""

    file_type: LlamaFileType
    type_of: Callable[[str, ModelShape], GGMLQuantizationType]

    def matrix_type(self, name: str, shape: ModelShape, columns: int) -> GGMLQuantizationType:
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


def _uniform_recipe(name: str, file_type: str) -> QuantRecipe:
    tensor_type = GGMLQuantizationType[name]
    return QuantRecipe(LlamaFileType[file_type], lambda _name, _shape: tensor_type)


def _medium_recipe(low: GGMLQuantizationType, file_type: LlamaFileType) -> QuantRecipe:
    """Return llama-quantize's Q4_K_M and Q5_K_M: Q6_K for the head, half of attn_v and ffn_down."""

    def type_of(name: str, shape: ModelShape) -> GGMLQuantizationType:
        if name == "output.weight" or (name == "token_embd.weight" and shape.tied):
            return GGMLQuantizationType.Q6_K
        if name.endswith(("attn_v.weight", "ffn_down.weight")):
            layer, n = int(name.split(".")[1]), shape.n_layers
            if layer < n // 8 or layer >= 7 * n // 8 or (layer - n // 8) % 3 == 2:
                return GGMLQuantizationType.Q6_K
        return low

    return QuantRecipe(file_type, type_of)


def _mxfp4_matrix_type(name: str, shape: ModelShape) -> GGMLQuantizationType:
    """Return MXFP4 for stacked experts; for all matrices of a model that has none."""
    return _T.MXFP4 if "_exps." in name or not shape.n_experts else _T.Q8_0


_PLAIN = "F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q6_K IQ4_NL IQ4_XS".split()
_SMALL = "Q2_K Q3_K Q4_K Q5_K".split()
QUANTS = {
    "F32": _uniform_recipe("F32", "ALL_F32"),
    **{name: _uniform_recipe(name, f"MOSTLY_{name}") for name in _PLAIN},
    **{name: _uniform_recipe(name, f"MOSTLY_{name}_S") for name in _SMALL},
    "Q4_K_M": _medium_recipe(GGMLQuantizationType.Q4_K, LlamaFileType.MOSTLY_Q4_K_M),
    "Q5_K_M": _medium_recipe(GGMLQuantizationType.Q5_K, LlamaFileType.MOSTLY_Q5_K_M),
    "MXFP4": QuantRecipe(LlamaFileType.MOSTLY_MXFP4_MOE, _mxfp4_matrix_type),
}


def shape_named(name: str) -> ModelShape:
    """Return the shape called `name`; raises BenchError, listing the shapes, if there is none."""
    if name not in SHAPES:
        raise BenchError(f"--shape {name}: no such shape; there are {', '.join(SHAPES)}")
    return SHAPES[name]


def quant_named(name: str) -> QuantRecipe:
    """Return the recipe called `name`; raises BenchError, listing them, if there is none."""
    if name not in QUANTS:
        raise BenchError(f"--quant {name}: no such type; there are {', '.join(QUANTS)}")
    return QUANTS[name]
