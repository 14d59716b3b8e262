"""Named model shapes and quantization recipes that synthetic models are made of."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gguf import GGMLQuantizationType, LlamaFileType

from orinbench.errors import BenchError


@dataclass(frozen=True)
class Shape:
    """Dimensions of a LLaMA-architecture model; widths are numbers of weights."""

    n_layers: int
    n_embd: int
    n_ff: int
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

    def matrices(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """Yield the name and (rows, columns) of each quantized tensor, in the file's order."""
        yield "token_embd.weight", (self.vocab_size, self.n_embd)
        q_rows, kv_rows = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        for layer in range(self.n_layers):
            for name, shape in (
                ("attn_q", (q_rows, self.n_embd)),
                ("attn_k", (kv_rows, self.n_embd)),
                ("attn_v", (kv_rows, self.n_embd)),
                ("attn_output", (self.n_embd, q_rows)),
                ("ffn_gate", (self.n_ff, self.n_embd)),
                ("ffn_up", (self.n_ff, self.n_embd)),
                ("ffn_down", (self.n_embd, self.n_ff)),
            ):
                yield f"blk.{layer}.{name}.weight", shape
        if not self.tied:
            yield "output.weight", (self.vocab_size, self.n_embd)

    def norms(self) -> Iterator[str]:
        """Yield the name of each RMSNorm weight, a vector of `n_embd` F32."""
        for layer in range(self.n_layers):
            yield f"blk.{layer}.attn_norm.weight"
            yield f"blk.{layer}.ffn_norm.weight"
        yield "output_norm.weight"


# 1b, 3b and 8b are the shapes of Llama 3.2 1B, Llama 3.2 3B and Llama 3 8B; 160m is that of
# JackFram/llama-160m with grouped queries. A context of 8192 is Llama 3's, without RoPE scaling.
SHAPES = {
    "tiny": Shape(2, 256, 512, 4, 2, 64, 1024, 512, tied=True, weight_std=0.06),
    "160m": Shape(12, 768, 3072, 12, 4, 64, 32000, 2048, tied=False, weight_std=0.03),
    "1b": Shape(16, 2048, 8192, 32, 8, 64, 128256, 8192, tied=True),
    "3b": Shape(28, 3072, 8192, 24, 8, 128, 128256, 8192, tied=True),
    "8b": Shape(32, 4096, 14336, 32, 8, 128, 128256, 8192, tied=False),
}


@dataclass(frozen=True)
class Quant:
    """Which type each matrix has, and the file type that names the mixture."""

    file_type: LlamaFileType
    type_of: Callable[[str, Shape], GGMLQuantizationType]


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


QUANTS = {
    "F16": _uniform("F16", "MOSTLY_F16"),
    "BF16": _uniform("BF16", "MOSTLY_BF16"),
    "Q4_0": _uniform("Q4_0", "MOSTLY_Q4_0"),
    "Q4_1": _uniform("Q4_1", "MOSTLY_Q4_1"),
    "Q5_0": _uniform("Q5_0", "MOSTLY_Q5_0"),
    "Q5_1": _uniform("Q5_1", "MOSTLY_Q5_1"),
    "Q8_0": _uniform("Q8_0", "MOSTLY_Q8_0"),
    "Q4_K": _uniform("Q4_K", "MOSTLY_Q4_K_S"),
    "Q4_K_M": _medium(GGMLQuantizationType.Q4_K, LlamaFileType.MOSTLY_Q4_K_M),
    "Q5_K": _uniform("Q5_K", "MOSTLY_Q5_K_S"),
    "Q5_K_M": _medium(GGMLQuantizationType.Q5_K, LlamaFileType.MOSTLY_Q5_K_M),
    "Q6_K": _uniform("Q6_K", "MOSTLY_Q6_K"),
    "IQ4_XS": _uniform("IQ4_XS", "MOSTLY_IQ4_XS"),
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
