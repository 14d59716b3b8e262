"""The lowering of a layer to launches: the walk over its steps, the same for all kinds of rows."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinygrad import dtypes
from tinygrad.device import Buffer
from tinygrad.dtype import DType

from orinllm.gpu.kernels.attention import AttentionInputs
from orinllm.gpu.kernels.buffers import (
    ALONE_WARPS,
    AttentionDims,
    LayerKvCache,
    PackedMatrix,
    SplitAttention,
)
from orinllm.gpu.kernels.mtp import TokenPlaces, join_normed_launch, keep_hidden_states_launch
from orinllm.gpu.kernels.rows import (
    NormWeights,
    activation_launch,
    add_gated_launch,
    add_merged_norms_launch,
    add_normed_launch,
    count_most_and_arguments,
    gate_launch,
    gated_activation_launch,
    layer_embeddings_launch,
    scale_launch,
)
from orinllm.gpu.launch import Launch
from orinllm.gpu.memory import ModelMemory
from orinllm.network import layer as network
from orinllm.network.config import LAYERS
from orinllm.network.layer import (
    Activate,
    AddDeepstackRows,
    AddMergedNorms,
    Attend,
    Linear,
    MixExperts,
    Recurrence,
    ScaleResidual,
    Step,
    X,
)

if TYPE_CHECKING:
    from orinllm.gpu.kernels.recurrent import StatePlaces
    from orinllm.gpu.steps.mixtures import MixtureLowering
    from orinllm.gpu.steps.recurrent import RecurrenceLowering


@dataclass(frozen=True)
class ProductEpilogue:
    """The end of a product, and where it goes: out = mode(W x) (epilogue.cuh)."""

    mode: str  # STORE, ADD or GATED
    out: Buffer
    factor: float = 1.0
    activation: str = "SILU"


class Lowering(ABC):
    """Launches of layers over `count` rows, a number of tokens or a chunk that says it.

    Values that products read are of type `inputs`, all others floats. What is gated or normed as
    soon as it is made lies in one buffer, whatever its name. `turns` is what rows are turned by,
    where positions have three parts (attention.py: AttentionInputs). `slots` says where the
    recurrent states of each sequence are. `at` says where tokens are: the state (attention.cu), or
    a chunk; `cache_view` how many sequences there are, and the table of their pages.
    """

    parts_of_turn = 1
    at: Buffer
    cache_view: tuple[int, Buffer]

    def __init__(
        self, memory: ModelMemory, count: int | Buffer, inputs: DType, slots: Buffer | None = None
    ) -> None:
        self.memory, self.count = memory, count
        sequences = count if isinstance(count, int) else 1
        self.slots = memory.zeroed_ints(sequences) if slots is None else slots
        _, self._rows, _ = count_most_and_arguments(count)
        by_parts = memory.config.uses_mrope
        self.turns = memory.zeroed_ints(self.parts_of_turn * self._rows) if by_parts else None
        steps = [step for layer in memory.config.layers for step in layer.steps]
        self._inputs, self._read = (
            inputs,
            {s.source for s in steps if isinstance(s.operation, Linear)},
        )
        self._gated = {step.gate.out for step in steps if step.gate} | {
            step.out_name for step in steps if isinstance(step.operation, Activate)
        }
        self._values = {X: memory.allocate(self._rows * memory.config.dim)}
        if memory.config.layer_embedding:
            self._value_buffer(LAYERS)
        for step in steps:
            self._make_result_buffer(step)
        widths = memory.config.value_widths
        brief = [
            widths[step.operation.out]
            for step in steps
            if step.gate or step.post or (step.add and step.add.by)
        ]
        self._aside = memory.allocate_scratch(self._rows * max(brief, default=1))

    def _make_result_buffer(self, step: Step) -> None:
        """Make the buffer of a step's result, if there is none."""
        self._value_buffer(step.out_name)

    def _value_buffer(self, name: str) -> Buffer:
        if name not in self._values:
            type_ = self._inputs if name in self._read else dtypes.float32
            size = self._rows * self.memory.config.value_widths[name]
            self._values[name] = self.memory.allocate_scratch(size, type_)
        return self._values[name]

    @property
    def residual(self) -> Buffer:
        """The residual stream: floats (rows, width)."""
        return self._values[X]

    @functools.cached_property
    def mixture_lowering(self) -> MixtureLowering:
        """Scratch of mixtures of experts, which dense models do not wait for."""
        from orinllm.gpu.steps.mixtures import MixtureLowering

        return MixtureLowering(self.memory, self._rows, rows=self._inputs == dtypes.uint16)

    @functools.cached_property
    def _recurrence_lowering(self) -> RecurrenceLowering:
        """The layers with states, which other models do not wait for."""
        from orinllm.gpu.steps.recurrent import RecurrenceLowering

        return RecurrenceLowering(self.memory, self._values, self._rows)

    def state_places(self, layer: int, operation: Recurrence) -> StatePlaces:
        """Return where the states of an operation are, and whose."""
        from orinllm.gpu.kernels.recurrent import StatePlaces
        from orinllm.gpu.memory import state_floats_per_slot

        states, stride = (
            self.memory.state_buffer(layer, operation),
            state_floats_per_slot(self.memory.config),
        )
        return StatePlaces(states, stride, self.slots, self.at, self.count)

    @abstractmethod
    def lower_product(self, layer: int, step: Step, wanted: ProductEpilogue) -> Iterator[Launch]:
        """Yield the launches of a step's matrices."""

    def lower_before_attention(self, layer: int, step: Step) -> Iterator[Launch]:
        """Yield what comes before attention: what turns heads, or keeps what it does not keep."""
        return iter(())

    @abstractmethod
    def lower_attention(self, layer: int, step: Step) -> Iterator[Launch]:
        """Yield a layer's attention."""

    @abstractmethod
    def lower_experts(self, layer: int, step: Step) -> Iterator[Launch]:
        """Yield x += a layer's mixture of experts, or its value = that."""

    def lower_deepstack_rows(self, part: int) -> Iterator[Launch]:
        """Yield x += what rows of pictures have beside their embeddings; tokens are none."""
        return iter(())

    def lower_layer_split_at_last_store(self, layer: int) -> tuple[list[Launch], list[Launch]]:
        """Return a layer's launches up to the last that keeps something, and those behind it."""
        launches, kept, config = list[Launch](), 0, self.memory.config
        for step in config.layers[layer].steps:
            match step.operation:
                case Linear():
                    launches += self._lower_linear(layer, step)
                case Attend():
                    launches += self.lower_before_attention(layer, step)
                    if step.operation.attention.reads is None:
                        kept = len(launches)
                    launches += self.lower_attention(layer, step)
                case MixExperts():
                    launches += self.lower_experts(layer, step)
                case AddDeepstackRows(part):
                    launches += self.lower_deepstack_rows(part)
                case Activate() as operation:
                    launches.append(self._activation_launch(layer, operation))
                case ScaleResidual(weight):
                    by = self.memory.weights.vector(f"{config.tensor_prefix(layer)}{weight}.weight")
                    launches.append(scale_launch(self.residual, by, self.count))
                case AddMergedNorms(values, norms, last):
                    three = [
                        self.memory.norm_weights(layer, network.Norm("", "", n))
                        for n in (*norms, last)
                    ]
                    first, second = (self._values[name] for name in values)
                    launches.append(
                        add_merged_norms_launch(three, self.residual, (first, second), self.count)
                    )
                case (
                    network.Convolve()
                    | network.GatedDeltaNet()
                    | network.SelectiveScan() as operation
                ):
                    places = self.state_places(layer, operation)
                    launches += self._recurrence_lowering.lower_operation(layer, operation, places)
                    kept = len(launches)
        return launches[:kept], launches[kept:]

    def _activation_launch(self, layer: int, operation: Activate) -> Launch:
        """Return an activation, alone or by elements of another value."""
        config, values = self.memory.config, self._values
        name, cols = (
            operation.activation.name,
            config.layers[layer].value_widths(config.dim)[operation.of],
        )
        out, inp = values[operation.out], values[operation.of]
        if operation.by is None:
            return activation_launch(out, inp, cols, name, self.count)
        by, first = values[operation.by], operation.first
        own = by.view(by.size - first, dtypes.float32, 4 * first).ensure_allocated()
        stride = config.value_widths[operation.by]
        return gated_activation_launch(out, inp, (own, stride), (cols, self.count), name)

    @property
    def layer_embeddings(self) -> Buffer | None:
        """The embeddings of each layer (rows, layers, size), of a model that has them."""
        return self._values.get(LAYERS)

    def lower_layer_embeddings(self) -> Iterator[Launch]:
        """Yield what makes them of the tokens' embeddings in `residual`."""
        if (out := self.layer_embeddings) is None:
            return
        config, weights = self.memory.config, self.memory.weights
        yield from self.lower_plain_product(weights.matrix("per_layer_model_proj"), out)
        vector = weights.vector("per_layer_proj_norm.weight")
        # The matrix' products are times dim^-1/2 before their norm.
        norm = NormWeights(vector, config.norm_eps * config.dim)
        table, by = weights.matrix("per_layer_token_embd"), config.layer_embedding**0.5
        yield layer_embeddings_launch(table, out, norm, self.at, by, self.count)

    @abstractmethod
    def lower_plain_product(
        self, matrix: PackedMatrix, out: Buffer, source: Buffer | None = None
    ) -> Iterator[Launch]:
        """Yield out = a matrix times `residual`, or other floats."""

    def lower_input(self, embed: Callable[[Buffer], Launch]) -> Iterator[Launch]:
        """Yield what makes `residual` of tokens: embeddings, which a block joins with states."""
        memory, config = self.memory, self.memory.config
        if config.joined is None:
            yield embed(self.residual)
            yield from self.lower_layer_embeddings()
            return
        assert memory.left is not None
        embedded, joined = (memory.allocate_scratch(self._rows * n * config.dim) for n in (1, 2))
        own, behind = (
            memory.weights.vector(f"{config.tensor_prefix(0)}nextn.{name}.weight")
            for name in ("enorm", "hnorm")
        )
        in_pages = not isinstance(self.count, int)
        last = memory.weights.vector(f"{config.final_norm}.weight")
        yield embed(embedded)
        yield join_normed_launch(
            joined,
            (embedded, memory.left.rows if in_pages else self.residual),
            (own, memory.left.norm if in_pages else last, behind),
            config.norm_eps,
            TokenPlaces(self.count, self.at, self.cache_view[1]),
        )
        yield from self.lower_plain_product(
            memory.weights.matrix(config.joined), self.residual, joined
        )

    def lower_kept_hidden_states(self) -> Iterator[Launch]:
        """Yield what keeps `residual` behind the last layer, where a block wants it."""
        left = self.memory.left
        if left is not None and self.memory.config.joined is None:
            yield keep_hidden_states_launch(
                left.rows, self.residual, TokenPlaces(self.count, self.at, self.cache_view[1])
            )

    def _lower_linear(self, layer: int, step: Step) -> Iterator[Launch]:
        """Yield a product, and what becomes of it where its own kernel cannot do that."""
        if step.gate is not None:
            activation, out = step.gate.activation.name, self._values[step.out_name]
            if can_gate_together(self.step_matrices(layer, step)):
                yield from self.lower_product(
                    layer, step, ProductEpilogue("GATED", out, activation=activation)
                )
                return
            aside = ProductEpilogue("STORE", self._aside, activation=activation)
            yield from self.lower_product(layer, step, aside)
            hidden = self.memory.config.layers[layer].value_widths(self.memory.config.dim)[
                step.out_name
            ]
            yield gate_launch(out, self._aside, hidden, activation, self.count)
        elif step.add is None:
            yield from self.lower_product(
                layer, step, ProductEpilogue("STORE", self._values[step.out_name])
            )
        elif step.add.by is not None:
            yield from self.lower_product(layer, step, ProductEpilogue("STORE", self._aside))
            by = self._values[step.add.by]
            yield add_gated_launch(self.residual, self._aside, by, step.add.scale, self.count)
        elif step.post is None:
            yield from self.lower_product(
                layer, step, ProductEpilogue("ADD", self.residual, step.add.scale)
            )
        else:
            yield from self.lower_product(layer, step, ProductEpilogue("STORE", self._aside))
            norm = self.memory.norm_weights(layer, step.post)
            yield add_normed_launch(norm, self.residual, self._aside, step.add.scale, self.count)

    def _matrix_names(self, layer: int, step: Step) -> list[str]:
        assert isinstance(step.operation, Linear)
        prefix = self.memory.config.tensor_prefix(layer)
        return [f"{prefix}{name}" for name, _ in step.operation.matrices]

    def step_matrices(self, layer: int, step: Step) -> tuple[PackedMatrix, ...]:
        """Return the matrices of a step."""
        return tuple(self.memory.weights.matrix(name) for name in self._matrix_names(layer, step))

    def step_biases(self, layer: int, step: Step) -> tuple[Buffer | None, ...]:
        """Return the bias of each matrix of a step that the file has one for."""
        return tuple(self.memory.weights.bias(name) for name in self._matrix_names(layer, step))

    def layer_cache(self, layer: int) -> LayerKvCache:
        """Return a layer's keys and values."""
        return self.memory.layer_cache(layer, *self.cache_view)

    def attention_inputs(self, layer: int, step: Step) -> AttentionInputs:
        """Return what a layer's attention reads."""
        memory, prefix = self.memory, self.memory.config.tensor_prefix(layer)
        weights = memory.weights
        return AttentionInputs(
            self.layer_cache(layer),
            self._values[step.source],
            memory.rotations[memory.config.attention_by_layer[layer].rope],
            weights.optional_vector(f"{prefix}attn_q_norm.weight"),
            weights.optional_vector(f"{prefix}attn_k_norm.weight"),
            weights.optional_vector(f"{prefix}attn_sinks.weight"),
            memory.config.norm_eps,
            memory.axes,
            self.turns,
        )


class AttentionScratch:
    """Scratch for the parts of a token's attention, of the layer that needs most of it."""

    def __init__(
        self, memory: ModelMemory, heads: dict[int, AttentionDims], splits: dict[int, int]
    ) -> None:
        counts = {
            layer: h.sequences * h.attention.heads * splits[layer] for layer, h in heads.items()
        }
        wide = max(count * heads[layer].attention.head_dim for layer, count in counts.items())
        self._part, self._part_ml = (
            memory.allocate_scratch(wide),
            memory.allocate_scratch(2 * max(counts.values())),
        )

    def split_attention_of_layer(
        self, heads: AttentionDims, splits: int, warps: int = ALONE_WARPS
    ) -> SplitAttention:
        """Return the parts of one layer."""
        return SplitAttention(heads, splits, self._part, self._part_ml, warps)


def can_gate_together(weights: tuple[PackedMatrix, ...]) -> bool:
    """True if one launch can gate two matrices: they are of one type."""
    return len({weight.type.id for weight in weights}) == 1


def logits_matrix(memory: ModelMemory) -> PackedMatrix:
    """Return the matrix that makes logits: the embedding table where a file has no other."""
    weights = memory.weights
    return weights.matrix("output" if weights.has_tensor("output.weight") else "token_embd")
