"""Layers with a state, lowered for cpu/recurrent.c."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from orinllm.network.layer import Convolve, GatedDeltaNet, Recurrence, SelectiveScan

if TYPE_CHECKING:
    from orinllm.cpu.program import LoweredModel

_I64, _POINTER = ctypes.c_int64, ctypes.c_uint64
_CONVOLVE, _DELTA, _SCAN = range(3)


class RecurrentStruct(ctypes.Structure):
    """`RecurrentStruct` of cpu/recurrent.c."""

    _fields_ = (
        ("kind", _I64),
        *((f"{name}{end}", kind) for name in ("in", "beside", "gates") for end, kind in (
            ("", _POINTER), ("_stride", _I64),
        )),
        *((name, _POINTER) for name in ("state", "out", "behind")),
        *((name, _I64) for name in ("slot_stride", "out_stride")),
        *((name, _POINTER) for name in ("weights", "bias", "decay", "dt", "skip", "norm")),
        *((name, _I64) for name in ("channels", "taps", "gated")),
        *((name, _I64) for name in ("heads", "groups", "size", "width")),
        ("eps", ctypes.c_double),
    )  # fmt: skip


def make_recurrent_struct(
    operation: Recurrence, prefix: str, memory: LoweredModel, widths: dict[str, int]
) -> RecurrentStruct:
    """Return an operation of a layer, but for its states. `widths`: of values, in elements."""

    def held(name: str, transposed: bool = False) -> int:
        tensor = memory.find_tensor_floats(prefix + name)
        if tensor is None:
            return 0
        return memory.store_floats(prefix + name, tensor.T if transposed else tensor)

    def rows(field: str, name: str, first: int = 0) -> dict[str, int]:
        return {field: memory.value_address(name) + 4 * first, f"{field}_stride": widths[name]}

    found: dict[str, Any] = rows("out", operation.out)
    match operation:
        case Convolve():
            found |= rows("in", operation.of, operation.first) | {
                "kind": _CONVOLVE,
                "weights": held(f"{operation.weight}.weight", transposed=True),
                "bias": held(f"{operation.weight}.bias"),
                "channels": operation.channels,
                "taps": operation.taps,
                "gated": operation.gated,
            }
        case GatedDeltaNet():
            found |= rows("in", operation.of) | rows("gates", operation.gates)
            found |= rows("beside", operation.beside, operation.first) | {
                "kind": _DELTA,
                "groups": operation.key_heads,
                "size": operation.size,
            }
        case SelectiveScan():
            found |= rows("in", operation.of) | rows("beside", operation.beside)
            dt = widths[operation.beside] - operation.heads
            found |= rows("gates", operation.beside, dt) | {
                "kind": _SCAN,
                "groups": operation.groups,
                "size": operation.head_dim,
                "width": operation.state,
                "skip": held("ssm_d"),
            }
    if not isinstance(operation, Convolve):
        found["heads"], found["decay"] = operation.heads, held("ssm_a")
        found["dt"], found["norm"] = held("ssm_dt.bias"), held("ssm_norm.weight")
    lowered = RecurrentStruct()
    for name, value in found.items():
        setattr(lowered, name, value)
    return lowered
