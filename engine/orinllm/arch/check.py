"""Does the file hold exactly the tensors that its Config computes with?

A tensor that nobody reads is refused like one that is missing: it is how a network that computes
something else under a known name shows itself.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from orinllm.arch.header import TensorShape
from orinllm.config import Config, Layer
from orinllm.errors import BadInput
from orinllm.ggml import kernel_types

F32 = 0
# What scales rotary positions: read by the architecture, not by the layers.
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


@dataclass(frozen=True)
class Wanted:
    """A tensor of a Config: its logical name, which ends in .weight or .bias, and its shape."""

    name: str
    shape: tuple[int, ...]  # rows first; of a matrix in a fused tensor its own part
    optional: bool = False

    @property
    def is_matrix(self) -> bool:
        """Return whether it may be quantized: vectors and biases are F32."""
        return self.name.endswith(".weight") and len(self.shape) > 1


def wanted_tensors(config: Config) -> Iterator[Wanted]:
    """Yield every tensor that the Config computes with, layers in order."""
    yield Wanted("token_embd.weight", (config.vocab_size, config.dim))
    for index, layer in enumerate(config.layers):
        prefix = f"blk.{index}."
        yield from _attention(config, layer, prefix)
        yield Wanted(f"{prefix}{config.ffn_norm}.weight", (config.dim,))
        yield from _feed_forward(config, layer, prefix)
        if layer.post_norms:
            yield Wanted(f"{prefix}post_attention_norm.weight", (config.dim,))
            yield Wanted(f"{prefix}post_ffw_norm.weight", (config.dim,))
    yield Wanted("output_norm.weight", (config.dim,))
    yield Wanted("output.weight", (config.vocab_size, config.dim), optional=True)


def _attention(config: Config, layer: Layer, prefix: str) -> Iterator[Wanted]:
    attention = layer.attention
    q_rows, kv_rows = (n * attention.head_dim for n in (attention.heads, attention.kv_heads))
    yield Wanted(f"{prefix}attn_norm.weight", (config.dim,))
    for name, rows in (("attn_q", q_rows), ("attn_k", kv_rows), ("attn_v", kv_rows)):
        yield Wanted(f"{prefix}{name}.weight", (rows, config.dim))
        yield Wanted(f"{prefix}{name}.bias", (rows,), optional=True)
    yield Wanted(f"{prefix}attn_output.weight", (config.dim, q_rows))
    yield Wanted(f"{prefix}attn_output.bias", (config.dim,), optional=True)
    if attention.qk_norm:
        yield Wanted(f"{prefix}attn_q_norm.weight", (attention.head_dim,))
        yield Wanted(f"{prefix}attn_k_norm.weight", (attention.head_dim,))
    if attention.sinks:
        yield Wanted(f"{prefix}attn_sinks.weight", (attention.heads,))


def _feed_forward(config: Config, layer: Layer, prefix: str) -> Iterator[Wanted]:
    experts, dim = layer.feed_forward.experts, config.dim
    if experts is None:
        hidden = layer.feed_forward.hidden
        yield Wanted(f"{prefix}ffn_gate.weight", (hidden, dim))
        yield Wanted(f"{prefix}ffn_up.weight", (hidden, dim))
        yield Wanted(f"{prefix}ffn_down.weight", (dim, hidden))
        return
    yield Wanted(f"{prefix}ffn_gate_inp.weight", (experts.count, dim))
    for name, rows, columns in (
        ("ffn_gate_exps", experts.hidden, dim),
        ("ffn_up_exps", experts.hidden, dim),
        ("ffn_down_exps", dim, experts.hidden),
    ):
        yield Wanted(f"{prefix}{name}.weight", (experts.count, rows, columns))
        if experts.biased:
            yield Wanted(f"{prefix}{name}.bias", (experts.count, rows))
    if experts.biased:
        yield Wanted(f"{prefix}ffn_gate_inp.bias", (experts.count,))


def check_tensors(config: Config, tensors: Mapping[str, TensorShape], rope: bool) -> None:
    """Raise BadInput for a missing or unknown tensor and for a wrong shape or type.

    `rope`: tensors that scale rotary positions are part of this architecture.
    """
    known = set(ROPE_TENSORS) if rope else set()
    for wanted in wanted_tensors(config):
        known.add(_check(config, wanted, tensors))
    if unknown := [name for name in tensors if name not in known]:
        others = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
        raise BadInput(
            f"tensor {unknown[0]}{others} is not part of the architecture {config.architecture} "
            "as it is supported: the file is of a variant that would be computed wrong"
        )


def _check(config: Config, wanted: Wanted, tensors: Mapping[str, TensorShape]) -> str:
    """Check one tensor and return its name in the file."""
    name, first, rows = wanted.name, 0, None
    if wanted.is_matrix:
        matrix = config.matrix(wanted.name.removesuffix(".weight"))
        name, first, rows = matrix.tensor, matrix.first_row, matrix.rows
    tensor = tensors.get(name)
    if tensor is None:
        if wanted.optional:
            return name
        raise BadInput(f"tensor {name} is missing; the architecture {config.architecture} has one")
    shape = tuple(tensor.shape)
    if rows is not None and len(shape) >= 2 and shape[-2] >= first + rows:
        shape = (*shape[:-2], rows, shape[-1])
    if shape != wanted.shape:
        raise BadInput(
            f"tensor {name} has the shape {tuple(tensor.shape)}; {wanted.shape} was expected"
            + (f" from row {first}" if rows is not None else "")
        )
    _check_type(name, tensor, wanted)
    return name


def _check_type(name: str, tensor: TensorShape, wanted: Wanted) -> None:
    known = {type_.id: type_.name for type_ in kernel_types().values()}
    if not wanted.is_matrix and tensor.type != F32:
        raise BadInput(
            f"tensor {name} has the type {known.get(tensor.type, tensor.type)}; F32 was expected"
        )
    if tensor.type != F32 and tensor.type not in known:
        raise BadInput(
            f"tensor {name} has the GGML type {tensor.type}, which is not supported; "
            f"supported are F32, {', '.join(known.values())}"
        )
