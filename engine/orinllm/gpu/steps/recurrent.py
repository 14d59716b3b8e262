"""Layers that keep a state of each sequence, of tokens and of chunks."""

from collections.abc import Iterator, Mapping

from tinygrad.device import Buffer

from orinllm.gpu.kernels.recurrent import (
    GateVectors,
    StatePlaces,
    StridedRows,
    convolution_launch,
    delta_net_launch,
    mamba2_launches,
)
from orinllm.gpu.launch import Launch
from orinllm.gpu.memory import ModelMemory
from orinllm.network.layer import Convolve, GatedDeltaNet, Recurrence, SelectiveScan


class RecurrenceLowering:
    """The launches over `rows` rows of named values."""

    def __init__(self, memory: ModelMemory, values: Mapping[str, Buffer], rows: int) -> None:
        self._memory, self._values = memory, values
        operations = [op for layer in memory.config.layers for op in layer.operations]
        widths = [op.output_width for op in operations if isinstance(op, SelectiveScan)]
        self._scanned = (
            memory.allocate_scratch(rows * max(widths)) if widths else None
        )  # before the norm of groups

    def lower_operation(
        self, layer: int, operation: Recurrence, places: StatePlaces
    ) -> Iterator[Launch]:
        """Yield the launches of one operation."""
        weights, prefix = self._memory.weights, self._memory.config.tensor_prefix(layer)
        widths = self._memory.config.layers[layer].value_widths(self._memory.config.dim)
        out = self._values[operation.out]

        def rows(name: str) -> StridedRows:
            return StridedRows(self._values[name], widths[name])

        match operation:
            case Convolve():
                weight = weights.vector(f"{prefix}{operation.weight}.weight")
                bias = weights.optional_vector(f"{prefix}{operation.weight}.bias")
                yield convolution_launch(operation, places, out, rows(operation.of), weight, bias)
            case GatedDeltaNet():
                values = rows(operation.of), rows(operation.beside), rows(operation.gates)
                yield delta_net_launch(operation, places, out, values, self._gate_vectors(prefix))
            case SelectiveScan():
                assert self._scanned is not None
                pair = rows(operation.of), rows(operation.beside)
                yield from mamba2_launches(
                    operation, places, (self._scanned, out), pair, self._gate_vectors(prefix)
                )

    def _gate_vectors(self, prefix: str) -> GateVectors:
        weights = self._memory.weights
        names = ("ssm_a", "ssm_dt.bias", "ssm_norm.weight")
        decay, dt, norm = (weights.vector(f"{prefix}{name}") for name in names)
        eps, skip = self._memory.config.norm_eps, weights.optional_vector(f"{prefix}ssm_d")
        return GateVectors(decay, dt, norm, eps, skip)
