"""Layers that keep a state of each sequence, of tokens and of chunks."""

from collections.abc import Iterator, Mapping

from tinygrad.device import Buffer

from orinllm.gpu.kernels.recurrent import Gates, Places, Rows, convolve, delta, scan
from orinllm.gpu.launch import Launch
from orinllm.gpu.memory import Memory
from orinllm.network.layer import Convolve, Delta, Recurrence, Scan


class Recurrences:
    """The launches over `rows` rows of named values."""

    def __init__(self, memory: Memory, values: Mapping[str, Buffer], rows: int) -> None:
        self._memory, self._values = memory, values
        operations = [op for layer in memory.config.layers for op in layer.operations]
        wide = max((op.width for op in operations if isinstance(op, Scan)), default=0)
        self._scanned = memory.scratch(rows * wide) if wide else None  # before the norm of groups

    def of(self, layer: int, operation: Recurrence, places: Places) -> Iterator[Launch]:
        """Yield the launches of one operation."""
        weights, prefix = self._memory.weights, self._memory.config.prefix(layer)
        widths = self._memory.config.layers[layer].widths(self._memory.config.dim)
        out = self._values[operation.out]

        def rows(name: str) -> Rows:
            return Rows(self._values[name], widths[name])

        match operation:
            case Convolve():
                weight = weights.vector(f"{prefix}{operation.weight}.weight")
                bias = weights.optional(f"{prefix}{operation.weight}.bias")
                yield convolve(operation, places, out, rows(operation.of), weight, bias)
            case Delta():
                values = rows(operation.of), rows(operation.beside), rows(operation.gates)
                yield delta(operation, places, out, values, self._gates(prefix))
            case Scan():
                assert self._scanned is not None
                pair = rows(operation.of), rows(operation.beside)
                yield from scan(operation, places, (self._scanned, out), pair, self._gates(prefix))

    def _gates(self, prefix: str) -> Gates:
        weights = self._memory.weights
        names = ("ssm_a", "ssm_dt.bias", "ssm_norm.weight")
        decay, dt, norm = (weights.vector(f"{prefix}{name}") for name in names)
        eps, skip = self._memory.config.norm_eps, weights.optional(f"{prefix}ssm_d")
        return Gates(decay, dt, norm, eps, skip)
