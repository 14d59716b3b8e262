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
from orinllm.gpu.kernels.buffers import ALONE_WARPS, AttentionParts, Cache, Heads, Weight
from orinllm.gpu.kernels.mtp import TokenRows, join_normed, keep_hidden_states
from orinllm.gpu.kernels.rows import (
    Norm,
    activate,
    activate_by,
    add_gated,
    add_merged_norms,
    add_norm,
    count_of,
    embed_layers,
    gate,
    scale,
)
from orinllm.gpu.launch import Launch
from orinllm.gpu.memory import Memory
from orinllm.network import layer as network
from orinllm.network.config import LAYERS
from orinllm.network.layer import (
    Activate,
    Attend,
    Deepstack,
    Linear,
    Merge,
    Mix,
    Recurrence,
    Scale,
    Step,
    X,
)

if TYPE_CHECKING:
    from orinllm.gpu.kernels.recurrent import Places
    from orinllm.gpu.steps.mixtures import Mixtures
    from orinllm.gpu.steps.recurrent import Recurrences


@dataclass(frozen=True)
class WantedProduct:
    """The product that kernels are to make: out = mode(W x) (epilogue.cuh)."""

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
        self, memory: Memory, count: int | Buffer, inputs: DType, slots: Buffer | None = None
    ) -> None:
        self.memory, self.count = memory, count
        sequences = count if isinstance(count, int) else 1
        self.slots = memory.zeros(sequences) if slots is None else slots
        _, self._rows, _ = count_of(count)
        by_parts = memory.config.turned_by_parts
        self.turns = memory.zeros(self.parts_of_turn * self._rows) if by_parts else None
        steps = [step for layer in memory.config.layers for step in layer.steps]
        self._inputs, self._read = (
            inputs,
            {s.source for s in steps if isinstance(s.operation, Linear)},
        )
        self._gated = {step.gate.out for step in steps if step.gate} | {
            step.out for step in steps if isinstance(step.operation, Activate)
        }
        self._values = {X: memory.empty(self._rows * memory.config.dim)}
        if memory.config.layer_embedding:
            self._buffer_of(LAYERS)
        for step in steps:
            self._make_result(step)
        widths = memory.config.widths
        brief = [
            widths[step.operation.out]
            for step in steps
            if step.gate or step.post or (step.add and step.add.by)
        ]
        self._aside = memory.scratch(self._rows * max(brief, default=1))

    def _make_result(self, step: Step) -> None:
        """Make the buffer of a step's result, if there is none."""
        self._buffer_of(step.out)

    def _buffer_of(self, name: str) -> Buffer:
        if name not in self._values:
            type_ = self._inputs if name in self._read else dtypes.float32
            size = self._rows * self.memory.config.widths[name]
            self._values[name] = self.memory.scratch(size, type_)
        return self._values[name]

    @property
    def x(self) -> Buffer:
        """The residual stream: floats (rows, width)."""
        return self._values[X]

    @functools.cached_property
    def mixtures(self) -> Mixtures:
        """Scratch of mixtures of experts, which dense models do not wait for."""
        from orinllm.gpu.steps.mixtures import Mixtures

        return Mixtures(self.memory, self._rows, rows=self._inputs == dtypes.uint16)

    @functools.cached_property
    def _recurrences(self) -> Recurrences:
        """The layers with states, which other models do not wait for."""
        from orinllm.gpu.steps.recurrent import Recurrences

        return Recurrences(self.memory, self._values, self._rows)

    def places(self, layer: int, operation: Recurrence) -> Places:
        """Return where the states of an operation are, and whose."""
        from orinllm.gpu.kernels.recurrent import Places
        from orinllm.gpu.memory import slot_floats

        states, stride = self.memory.states_of(layer, operation), slot_floats(self.memory.config)
        return Places(states, stride, self.slots, self.at, self.count)

    @abstractmethod
    def product(self, layer: int, step: Step, wanted: WantedProduct) -> Iterator[Launch]:
        """Yield the launches of a step's matrices."""

    @abstractmethod
    def store(self, layer: int, step: Step) -> Iterator[Launch]:
        """Yield what comes before attention: what turns heads, or keeps what it does not keep."""

    @abstractmethod
    def attend(self, layer: int, step: Step) -> Iterator[Launch]:
        """Yield a layer's attention."""

    @abstractmethod
    def mix_experts(self, layer: int, step: Step) -> Iterator[Launch]:
        """Yield x += a layer's mixture of experts, or its value = that."""

    def add_pictures(self, part: int) -> Iterator[Launch]:
        """Yield x += what rows of pictures have beside their embeddings; tokens are none."""
        return iter(())

    def layer(self, layer: int) -> tuple[list[Launch], list[Launch]]:
        """Return a layer's launches up to the last that keeps something, and those behind it."""
        launches, kept, config = list[Launch](), 0, self.memory.config
        for step in config.layers[layer].steps:
            match step.operation:
                case Linear():
                    launches += self._linear(layer, step)
                case Attend():
                    launches += self.store(layer, step)
                    if step.operation.attention.reads is None:
                        kept = len(launches)
                    launches += self.attend(layer, step)
                case Mix():
                    launches += self.mix_experts(layer, step)
                case Deepstack(part):
                    launches += self.add_pictures(part)
                case Activate() as operation:
                    launches.append(self._activate(layer, operation))
                case Scale(weight):
                    by = self.memory.weights.vector(f"{config.prefix(layer)}{weight}.weight")
                    launches.append(scale(self.x, by, self.count))
                case Merge(values, norms, last):
                    three = [
                        self.memory.norm(layer, network.Norm("", "", n)) for n in (*norms, last)
                    ]
                    first, second = (self._values[name] for name in values)
                    launches.append(add_merged_norms(three, self.x, (first, second), self.count))
                case network.Convolve() | network.Delta() | network.Scan() as operation:
                    places = self.places(layer, operation)
                    launches += self._recurrences.of(layer, operation, places)
                    kept = len(launches)
        return launches[:kept], launches[kept:]

    def _activate(self, layer: int, operation: Activate) -> Launch:
        """Return an activation, alone or by elements of another value."""
        config, values = self.memory.config, self._values
        name, cols = (
            operation.activation.name,
            config.layers[layer].widths(config.dim)[operation.of],
        )
        out, inp = values[operation.out], values[operation.of]
        if operation.by is None:
            return activate(out, inp, cols, name, self.count)
        by, first = values[operation.by], operation.first
        own = by.view(by.size - first, dtypes.float32, 4 * first).ensure_allocated()
        stride = config.widths[operation.by]
        return activate_by(out, inp, (own, stride), (cols, self.count), name)

    @property
    def layered(self) -> Buffer | None:
        """The embeddings of each layer (rows, layers, size), of a model that has them."""
        return self._values.get(LAYERS)

    def embed_layers(self) -> Iterator[Launch]:
        """Yield what makes them of the tokens' embeddings in `x`."""
        if (out := self.layered) is None:
            return
        config, weights = self.memory.config, self.memory.weights
        yield from self.layer_product(weights.matrix("per_layer_model_proj"), out)
        vector = weights.vector("per_layer_proj_norm.weight")
        # The matrix' products are times dim^-1/2 before their norm.
        norm = Norm(vector, config.norm_eps * config.dim)
        table, by = weights.matrix("per_layer_token_embd"), config.layer_embedding**0.5
        yield embed_layers(table, out, norm, self.at, by, self.count)

    @abstractmethod
    def layer_product(
        self, matrix: Weight, out: Buffer, source: Buffer | None = None
    ) -> Iterator[Launch]:
        """Yield out = a matrix times `x`, or other floats."""

    def begin(self, embed: Callable[[Buffer], Launch]) -> Iterator[Launch]:
        """Yield what makes `x` of tokens: their embeddings, which a block joins with states."""
        memory, config = self.memory, self.memory.config
        if config.joined is None:
            yield embed(self.x)
            yield from self.embed_layers()
            return
        assert memory.left is not None
        embedded, joined = (memory.scratch(self._rows * n * config.dim) for n in (1, 2))
        own, behind = (
            memory.weights.vector(f"{config.prefix(0)}nextn.{name}.weight")
            for name in ("enorm", "hnorm")
        )
        in_pages = not isinstance(self.count, int)
        last = memory.weights.vector(f"{config.final_norm}.weight")
        yield embed(embedded)
        yield join_normed(
            joined,
            (embedded, memory.left.rows if in_pages else self.x),
            (own, memory.left.norm if in_pages else last, behind),
            config.norm_eps,
            TokenRows(self.count, self.at, self.cache_view[1]),
        )
        yield from self.layer_product(memory.weights.matrix(config.joined), self.x, joined)

    def end(self) -> Iterator[Launch]:
        """Yield what keeps `x` behind the last layer, where a block wants it."""
        left = self.memory.left
        if left is not None and self.memory.config.joined is None:
            yield keep_hidden_states(
                left.rows, self.x, TokenRows(self.count, self.at, self.cache_view[1])
            )

    def _linear(self, layer: int, step: Step) -> Iterator[Launch]:
        """Yield a product, and what becomes of it where its own kernel cannot do that."""
        if step.gate is not None:
            activation, out = step.gate.activation.name, self._values[step.out]
            if gated_together(self.weights(layer, step)):
                yield from self.product(
                    layer, step, WantedProduct("GATED", out, activation=activation)
                )
                return
            aside = WantedProduct("STORE", self._aside, activation=activation)
            yield from self.product(layer, step, aside)
            hidden = self.memory.config.layers[layer].widths(self.memory.config.dim)[step.out]
            yield gate(out, self._aside, hidden, activation, self.count)
        elif step.add is None:
            yield from self.product(layer, step, WantedProduct("STORE", self._values[step.out]))
        elif step.add.by is not None:
            yield from self.product(layer, step, WantedProduct("STORE", self._aside))
            by = self._values[step.add.by]
            yield add_gated(self.x, self._aside, by, step.add.scale, self.count)
        elif step.post is None:
            yield from self.product(layer, step, WantedProduct("ADD", self.x, step.add.scale))
        else:
            yield from self.product(layer, step, WantedProduct("STORE", self._aside))
            norm = self.memory.norm(layer, step.post)
            yield add_norm(norm, self.x, self._aside, step.add.scale, self.count)

    def _names(self, layer: int, step: Step) -> list[str]:
        assert isinstance(step.operation, Linear)
        prefix = self.memory.config.prefix(layer)
        return [f"{prefix}{name}" for name, _ in step.operation.matrices]

    def weights(self, layer: int, step: Step) -> tuple[Weight, ...]:
        """Return the matrices of a step."""
        return tuple(self.memory.weights.matrix(name) for name in self._names(layer, step))

    def biases(self, layer: int, step: Step) -> tuple[Buffer | None, ...]:
        """Return the bias of each matrix of a step that the file has one for."""
        return tuple(self.memory.weights.bias(name) for name in self._names(layer, step))

    def cache(self, layer: int) -> Cache:
        """Return a layer's keys and values."""
        return self.memory.cache(layer, *self.cache_view)

    def attention_inputs(self, layer: int, step: Step) -> AttentionInputs:
        """Return what a layer's attention reads."""
        memory, prefix = self.memory, self.memory.config.prefix(layer)
        weights = memory.weights
        return AttentionInputs(
            self.cache(layer),
            self._values[step.source],
            memory.rotations[memory.config.attentions[layer].rope],
            weights.optional(f"{prefix}attn_q_norm.weight"),
            weights.optional(f"{prefix}attn_k_norm.weight"),
            weights.optional(f"{prefix}attn_sinks.weight"),
            memory.config.norm_eps,
            memory.axes,
            self.turns,
        )


class PartsBuffers:
    """Scratch for the parts of a token's attention, of the layer that needs most of it."""

    def __init__(self, memory: Memory, heads: dict[int, Heads], splits: dict[int, int]) -> None:
        counts = {
            layer: h.sequences * h.attention.heads * splits[layer] for layer, h in heads.items()
        }
        wide = max(count * heads[layer].attention.head_dim for layer, count in counts.items())
        self._part, self._part_ml = memory.scratch(wide), memory.scratch(2 * max(counts.values()))

    def of(self, heads: Heads, splits: int, warps: int = ALONE_WARPS) -> AttentionParts:
        """Return the parts of one layer."""
        return AttentionParts(heads, splits, self._part, self._part_ml, warps)


def gated_together(weights: tuple[Weight, ...]) -> bool:
    """True if one launch can gate two matrices: they are of one type."""
    return len({weight.type.id for weight in weights}) == 1


def head_matrix(memory: Memory) -> Weight:
    """Return the matrix that makes logits: the embedding table where a file has no other."""
    weights = memory.weights
    return weights.matrix("output" if weights.has("output.weight") else "token_embd")
