"""The layers of a model over rows of halves on tensor cores: a prompt's chunk, or a batch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

from tinygrad import dtypes
from tinygrad.device import Buffer

from orinllm.gpu.kernels.buffers import PackedMatrix
from orinllm.gpu.kernels.gemm import RowProduct
from orinllm.gpu.kernels.rows import norm_rows_launch, to_float16_launch
from orinllm.gpu.launch import Launch
from orinllm.gpu.memory import ModelMemory
from orinllm.gpu.steps.lowering import Lowering, ProductEpilogue
from orinllm.network.layer import Linear, Step, X

# X in halves, for products that no norm comes before.
_HALVES, _JOINED = "x in halves", "what a block joins, in halves"


class RowLowering(Lowering):
    """Scratch of `count` rows, a number or a chunk that says it, and the launches of a layer.

    Norms are launches, which leave halves: what products read. `idle_state`: the state
    (attention.cu) that says which rows are idle; None where none is.
    """

    idle_state: Buffer | None = None

    def __init__(
        self, memory: ModelMemory, count: int | Buffer, slots: Buffer | None = None
    ) -> None:
        super().__init__(memory, count, dtypes.uint16, slots)

    def _make_result_buffer(self, step: Step) -> None:
        super()._make_result_buffer(step)
        if step.norm is not None:
            self.float16_buffer(step.norm.out, self.memory.config.value_widths[step.source])
        elif isinstance(step.operation, Linear) and step.source == X:
            self.float16_buffer(_HALVES, self.memory.config.dim)

    def float16_buffer(self, name: str, width: int) -> Buffer:
        """Return the halves that a norm leaves for products."""
        if name not in self._values:
            self._values[name] = self.memory.allocate_scratch(self._rows * width, dtypes.uint16)
        return self._values[name]

    @abstractmethod
    def product_launches(self, product: RowProduct) -> Iterator[Launch]:
        """Yield the launches of a product."""

    def lower_product(self, layer: int, step: Step, wanted: ProductEpilogue) -> Iterator[Launch]:
        """Yield the norm before a step, if it has one, and its product."""
        yield from self._lower_norm_before(layer, step)
        plain, source = step.norm is None and step.source == X, step.source
        if plain:
            source = _HALVES
            yield to_float16_launch(
                self._values[source], self.residual, self.memory.config.dim, self.count
            )
        product = RowProduct(
            step.operation.out,
            wanted.mode,
            self.step_matrices(layer, step),
            wanted.out,
            self._values[step.norm.out if step.norm else source],
            self.count,
            biases=self.step_biases(layer, step),
            factor=wanted.factor,
            activation=wanted.activation,
            of_hidden=plain or step.source in self._gated,
        )
        yield from self.product_launches(product)

    def lower_plain_product(
        self, matrix: PackedMatrix, out: Buffer, source: Buffer | None = None
    ) -> Iterator[Launch]:
        """See `Lowering`."""
        halves = self.float16_buffer(_HALVES if source is None else _JOINED, matrix.cols)
        yield to_float16_launch(
            halves, self.residual if source is None else source, matrix.cols, self.count
        )
        pair = (out, halves)
        yield from self.product_launches(
            RowProduct("layers", "STORE", (matrix,), *pair, self.count, of_hidden=True)
        )

    def _lower_norm_before(self, layer: int, step: Step) -> Iterator[Launch]:
        if step.norm is not None:
            norm, out = self.memory.norm_weights(layer, step.norm), self._values[step.norm.out]
            yield norm_rows_launch(norm, out, self._values[step.source], self.count)

    def lower_experts(self, layer: int, step: Step) -> Iterator[Launch]:
        """Yield the mixture of all rows that are not idle."""
        assert step.norm is not None
        yield from self._lower_norm_before(layer, step)
        rows = self.residual, self._values[step.norm.out], self._values[step.out_name]
        lower = self.mixture_lowering.lower_grouped_by_expert
        yield from lower(layer, step, rows, self.count, self.idle_state)
