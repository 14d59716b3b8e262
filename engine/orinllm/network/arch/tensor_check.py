"""Does the file hold exactly the tensors that its Config computes with?

A tensor that nobody reads is refused like one that is missing: it is how a network that computes
something else under a known name shows itself.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from orinllm.errors import BadInput
from orinllm.file.ggml import kernel_ggml_types
from orinllm.network.arch.header import TensorShapeAndType
from orinllm.network.config import Config
from orinllm.network.layer import (
    AddMergedNorms,
    Attend,
    Convolve,
    Experts,
    GatedDeltaNet,
    Linear,
    MixExperts,
    Norm,
    Operation,
    Recurrence,
    ScaleResidual,
    SelectiveScan,
    X,
)

F32 = 0
# Rows of numbers that are no matrix: kernels of convolutions, and norms by group.
SMALL = ("conv1d", "shortconv.conv", "ssm_norm")
# What scales rotary positions: read by the architecture, not by the layers.
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


@dataclass(frozen=True)
class WantedTensor:
    """A tensor of a Config: its logical name, which ends in .weight or .bias, and its shape."""

    name: str
    shape: tuple[int, ...]  # rows first; of a matrix in a fused tensor its own part
    optional: bool = False

    @property
    def is_matrix(self) -> bool:
        """Return whether it may be quantized: vectors and biases are F32."""
        name = self.name.removesuffix(".weight")
        return name != self.name and len(self.shape) > 1 and not name.endswith(SMALL)


def wanted_tensors(config: Config) -> Iterator[WantedTensor]:
    """Yield every tensor that the Config computes with, layers in order."""
    yield WantedTensor("token_embd.weight", (config.vocab_size, config.dim))
    if each := config.layer_embedding:
        wide = each * len(config.layers)
        yield WantedTensor("per_layer_token_embd.weight", (config.vocab_size, wide))
        yield WantedTensor("per_layer_model_proj.weight", (wide, config.dim))
        yield WantedTensor("per_layer_proj_norm.weight", (each,))
    for index, layer in enumerate(config.layers, config.first):
        widths = layer.value_widths(config.dim)
        for operation in layer.operations:
            for wanted in _tensors_of_operation(operation, widths):
                yield replace(wanted, name=f"blk.{index}.{wanted.name}")
    if config.joined is not None:
        yield WantedTensor(f"{config.joined}.weight", (config.dim, 2 * config.dim))
        for name in ("enorm", "hnorm"):
            yield WantedTensor(f"blk.{config.first}.nextn.{name}.weight", (config.dim,))
    yield WantedTensor(f"{config.final_norm}.weight", (config.dim,))
    yield WantedTensor("output.weight", (config.vocab_size, config.dim), optional=True)


def _tensors_of_operation(
    operation: Operation, widths: Mapping[str, int]
) -> Iterator[WantedTensor]:
    """Yield the tensors of one operation, without their layer."""
    match operation:
        case Norm():
            yield WantedTensor(f"{operation.weight}.weight", (widths[operation.of],))
        case Linear():
            for name, rows in operation.matrices:
                yield WantedTensor(f"{name}.weight", (rows, widths[operation.of]))
                if operation.biased:
                    yield WantedTensor(f"{name}.bias", (rows,), optional=True)
        case Attend():
            attention = operation.attention
            if attention.qk_norm:
                yield WantedTensor("attn_q_norm.weight", (attention.head_dim,))
                # A layer that reads another one's keys may have a norm for some all the same.
                own = attention.reads is None
                yield WantedTensor("attn_k_norm.weight", (attention.head_dim,), optional=not own)
                for name in () if own else "kv":
                    shape = (attention.kv_width, widths[X])
                    yield WantedTensor(f"attn_{name}.weight", shape, optional=True)
            if attention.sinks:
                yield WantedTensor("attn_sinks.weight", (attention.heads,))
        case MixExperts():
            yield from _tensors_of_experts(operation.experts, widths[operation.of])
        case AddMergedNorms():
            for name in (*operation.norms, operation.norm):
                yield WantedTensor(f"{name}.weight", (widths[X],))
        case ScaleResidual():
            yield WantedTensor(f"{operation.weight}.weight", (1,))
        case Convolve() | GatedDeltaNet() | SelectiveScan():
            yield from _tensors_of_recurrence(operation)


def _tensors_of_recurrence(operation: Recurrence) -> Iterator[WantedTensor]:
    match operation:
        case Convolve():
            yield WantedTensor(f"{operation.weight}.weight", (operation.channels, operation.taps))
            if not operation.gated:
                yield WantedTensor(f"{operation.weight}.bias", (operation.channels,), optional=True)
        case GatedDeltaNet():
            yield WantedTensor("ssm_a", (operation.heads,))
            yield WantedTensor("ssm_dt.bias", (operation.heads,))
            yield WantedTensor("ssm_norm.weight", (operation.size,))
        case SelectiveScan():
            yield WantedTensor("ssm_a", (operation.heads, 1))
            yield WantedTensor("ssm_d", (operation.heads, 1))
            yield WantedTensor("ssm_dt.bias", (operation.heads,))
            per_group = operation.output_width // operation.groups
            yield WantedTensor("ssm_norm.weight", (operation.groups, per_group))


def _tensors_of_experts(experts: Experts, dim: int) -> Iterator[WantedTensor]:
    yield WantedTensor("ffn_gate_inp.weight", (experts.count, dim))
    for name, rows, columns in (
        ("ffn_gate_exps", experts.hidden, dim),
        ("ffn_up_exps", experts.hidden, dim),
        ("ffn_down_exps", dim, experts.hidden),
    ):
        if name == "ffn_gate_exps" and not experts.gated:
            continue
        yield WantedTensor(f"{name}.weight", (experts.count, rows, columns))
        if experts.biased:
            yield WantedTensor(f"{name}.bias", (experts.count, rows))
    if experts.biased:
        yield WantedTensor("ffn_gate_inp.bias", (experts.count,))
    if experts.choice_bias:
        yield WantedTensor("exp_probs_b.bias", (experts.count,))
    if experts.reads_x:
        yield WantedTensor("ffn_gate_inp.scale", (dim,))
    if experts.scaled:
        yield WantedTensor("ffn_down_exps.scale", (experts.count,))


def check_tensors(
    config: Config, tensors: Mapping[str, TensorShapeAndType], rope: bool, blocks: int = 0
) -> None:
    """Raise BadInput for a missing or unknown tensor and for a wrong shape or type.

    `rope`: tensors that scale rotary positions are part of this architecture. `blocks`: those of
    the file; what is behind the layers is checked where it is computed, as a Config of its own,
    which in turn takes the layers as they are.
    """
    known = set(ROPE_TENSORS) if rope else set()
    for wanted in wanted_tensors(config):
        known.add(_checked_tensor_name(config, wanted, tensors))
    unread = (name for name in tensors if name not in known)
    if unknown := [name for name in unread if not _belongs_to_other_block(name, config, blocks)]:
        others = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
        raise BadInput(
            f"tensor {unknown[0]}{others} is not part of the architecture {config.architecture} "
            "as it is supported: the file is of a variant that would be computed wrong"
        )


def _belongs_to_other_block(name: str, config: Config, blocks: int) -> bool:
    """Say whether a tensor is of another of the file's blocks than the Config's layers.

    What is of no block is the model's own, if the Config is that of a block.
    """
    if config.is_in_other_block(name):
        return int(name.split(".")[1]) < blocks
    return config.joined is not None and not name.startswith("blk.")


def _checked_tensor_name(
    config: Config, wanted: WantedTensor, tensors: Mapping[str, TensorShapeAndType]
) -> str:
    """Check one tensor and return its name in the file."""
    name, first, rows = wanted.name, 0, None
    if wanted.is_matrix:
        matrix = config.rows_of_matrix(wanted.name.removesuffix(".weight"))
        name, first, rows = matrix.tensor, matrix.first_row, matrix.rows
    tensor = tensors.get(name)
    if tensor is None:
        if wanted.optional:
            return name
        raise BadInput(f"tensor {name} is missing; the architecture {config.architecture} has one")
    shape = tuple(tensor.shape)
    if wanted.shape[:-1] == (1,) and len(shape) == 1:  # a matrix of one row
        shape = (1, *shape)
    if rows is not None and len(shape) >= 2 and shape[-2] >= first + rows:
        shape = (*shape[:-2], rows, shape[-1])
    if shape != wanted.shape:
        raise BadInput(
            f"tensor {name} has the shape {tuple(tensor.shape)}; {wanted.shape} was expected"
            + (f" from row {first}" if rows is not None else "")
        )
    _check_tensor_type(name, tensor, wanted)
    return name


def _check_tensor_type(name: str, tensor: TensorShapeAndType, wanted: WantedTensor) -> None:
    known = {type_.id: type_.name for type_ in kernel_ggml_types().values()}
    if not wanted.is_matrix and tensor.type != F32:
        raise BadInput(
            f"tensor {name} has the type {known.get(tensor.type, tensor.type)}; F32 was expected"
        )
    if tensor.type != F32 and tensor.type not in known:
        raise BadInput(
            f"tensor {name} has the GGML type {tensor.type}, which is not supported; "
            f"supported are F32, {', '.join(known.values())}"
        )
