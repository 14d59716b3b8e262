"""The layers of a model over rows of halves on tensor cores: a prompt's chunk, or a batch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

from tinygrad import dtypes
from tinygrad.device import Buffer

from orinllm.gpu.kernels.buffers import Weight
from orinllm.gpu.kernels.gemm import RowProduct
from orinllm.gpu.kernels.rows import norm_rows, to_halves
from orinllm.gpu.launch import Launch
from orinllm.gpu.memory import Memory
from orinllm.gpu.steps.lowering import Lowering, WantedProduct
from orinllm.network.layer import Linear, Step, X

# X in halves, for products that no norm comes before.
_HALVES, _JOINED = "x in halves", "what a block joins, in halves"


class RowList(Lowering):
    """Scratch of `count` rows, a number or a chunk that says it, and the launches of a layer.

    Norms are launches, which leave halves: what products read.
    """

    def __init__(self, memory: Memory, count: int | Buffer, slots: Buffer | None = None) -> None:
        super().__init__(memory, count, dtypes.uint16, slots)

    def _make_result(self, step: Step) -> None:
        super()._make_result(step)
        if step.norm is not None:
            self.halves(step.norm.out, self.memory.config.widths[step.source])
        elif isinstance(step.operation, Linear) and step.source == X:
            self.halves(_HALVES, self.memory.config.dim)

    def halves(self, name: str, width: int) -> Buffer:
        """Return the halves that a norm leaves for products."""
        if name not in self._values:
            self._values[name] = self.memory.scratch(self._rows * width, dtypes.uint16)
        return self._values[name]

    @abstractmethod
    def products(self, product: RowProduct) -> Iterator[Launch]:
        """Yield the launches of a product."""

    def product(self, layer: int, step: Step, wanted: WantedProduct) -> Iterator[Launch]:
        """Yield the norm before a step, if it has one, and its product."""
        yield from self._norm_before(layer, step)
        plain, source = step.norm is None and step.source == X, step.source
        if plain:
            source = _HALVES
            yield to_halves(self._values[source], self.x, self.memory.config.dim, self.count)
        product = RowProduct(
            step.operation.out,
            wanted.mode,
            self.weights(layer, step),
            wanted.out,
            self._values[step.norm.out if step.norm else source],
            self.count,
            biases=self.biases(layer, step),
            factor=wanted.factor,
            activation=wanted.activation,
            of_hidden=plain or step.source in self._gated,
        )
        yield from self.products(product)

    def layer_product(
        self, matrix: Weight, out: Buffer, source: Buffer | None = None
    ) -> Iterator[Launch]:
        """See `Lowering`."""
        halves = self.halves(_HALVES if source is None else _JOINED, matrix.cols)
        yield to_halves(halves, self.x if source is None else source, matrix.cols, self.count)
        pair = (out, halves)
        yield from self.products(
            RowProduct("layers", "STORE", (matrix,), *pair, self.count, of_hidden=True)
        )

    def _norm_before(self, layer: int, step: Step) -> Iterator[Launch]:
        if step.norm is not None:
            norm, out = self.memory.norm(layer, step.norm), self._values[step.norm.out]
            yield norm_rows(norm, out, self._values[step.source], self.count)

    def mix_experts(self, layer: int, step: Step) -> Iterator[Launch]:
        """Yield the mixture of all rows that are not idle."""
        assert step.norm is not None
        yield from self._norm_before(layer, step)
        rows = self.x, self._values[step.norm.out], self._values[step.out]
        yield from self.mixtures.of_rows(layer, step, rows, self.count, self.idle_state)

    @property
    def idle_state(self) -> Buffer | None:
        """The state (attention.cu) that says which rows are idle; None where none is."""
        return None
