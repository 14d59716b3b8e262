"""mma, ldmatrix and wmma as C: calls of tensor.h."""

from __future__ import annotations

from collections.abc import Callable

from ..operands import InstructionInKernel, state_space
from ..parser.syntax import Operand
from .groups import NOTHING, Writer, address_writer, result_place_writer, source_writer
from .memory import SPACE
from .operand_writer import OperandWriter, UnknownFormError

MMA_SHAPES = {
    "m16n8k16": (16, 16), "m16n8k8": (16, 8), "m16n8k4": (16, 4), "m16n8k32": (16, 32),
    "m8n8k16": (8, 16), "m8n8k4": (8, 4),
}  # fmt: skip
"""Rows and depth; all have eight columns."""
WMMA_SHAPES = {
    "m16n16k16": (16, 16, 16), "m32n8k16": (32, 8, 16), "m8n32k16": (8, 32, 16),
    "m16n16k8": (16, 16, 8), "m8n8k4": (8, 8, 4),
}  # fmt: skip
_BYTES = {"f16": 2, "bf16": 2, "s8": 1, "u8": 1, "tf32": 4, "f64": 8, "f32": 4, "s32": 4}
_ELEMENTS = {"f16": 16, "bf16": 16, "tf32": 32, "f64": 64, "s8": 8, "u8": 8}


def _fragment_writer(w: OperandWriter, items: list[Operand | None], kind: str, per: int) -> Writer:
    bits = 64 if kind == "f64" else 32
    registers = [source_writer(w, item, bits) for item in items]
    return lambda place: (
        f"&(Fragment){{E_{kind.upper()}, {per}, {{{', '.join(r(place) for r in registers)}}}}}"
    )


def _results_writer(w: OperandWriter, bits: int) -> Writer:
    goals = [result_place_writer(item, bits) for item in w.operand_items(0)]
    return lambda place: f"(void *[]){{{', '.join(g(place) for g in goals)}}}"


def emit_mma(w: OperandWriter) -> Writer:
    """mma.sync row.col of f16, bf16, tf32, f64 and 8-bit integers."""
    shape = next((m for m in w.mods if m in MMA_SHAPES), None)
    if (
        shape is None
        or not w.has_modifier("row")
        or not w.has_modifier("col")
        or w.has_modifier("sp")
    ):
        raise UnknownFormError
    rows, depth = MMA_SHAPES[shape]
    td, ta, tb, tc = (t.name for t in w.types)
    if (shape, ta) == ("m8n8k4", "f16"):
        raise w.make_error("this shape of the first tensor cores is not supported")
    if ta not in _ELEMENTS or tb not in _ELEMENTS:
        raise UnknownFormError
    per = (64 if ta == "f64" else 32) // _ELEMENTS[ta]
    held = [rows * depth // 32 // per, depth // 4 // per, rows // (8 if tc == "f16" else 4)]
    if [len(w.operand_items(n)) for n in (1, 2, 3)] != held:
        raise w.make_error("wrong number of registers")
    parts = (
        _results_writer(w, 64 if td == "f64" else 32),
        _fragment_writer(w, w.operand_items(1), ta, per),
        _fragment_writer(w, w.operand_items(2), tb, per),
        _fragment_writer(w, w.operand_items(3), tc, 2 if tc == "f16" else 1),
    )  # fmt: skip
    head = f"multiply(c, {rows}, {depth}, E_{td.upper()}, {int(w.has_modifier('satfinite'))}"
    return lambda place: ", ".join([head, *(part(place) for part in parts)]) + ")"


def emit_ldmatrix(w: OperandWriter) -> Writer:
    """ldmatrix .m8n8 .x1/.x2/.x4, with or without .trans."""
    items, space = w.operand_items(0), state_space(w)
    if (
        not w.has_modifier("m8n8")
        or not w.has_modifier("b16")
        or space not in ("shared", "generic")
    ):
        raise UnknownFormError
    if len(items) != next((int(m[1:]) for m in w.mods if m in ("x1", "x2", "x4")), 0):
        raise w.make_error("wrong number of destinations")
    place_of, goals = address_writer(w, 1), _results_writer(w, 32)
    head = (
        f"load_matrices(c, {len(items)}, {int(w.has_modifier('trans'))}, "
        f"{int(space == 'generic')}, {w.frame.site_number(w.i)}"
    )
    return lambda place: f"{head}, (uint32_t *const *){goals(place)}, {place_of(place)})"


def _wmma_shape(w: InstructionInKernel) -> tuple[int, int, int]:
    name = next((m for m in w.mods if m in WMMA_SHAPES), None)
    if name is None:
        raise w.make_error("this shape of wmma is not supported")
    return WMMA_SHAPES[name]


def _register_bits_of_type(kind: str) -> int:
    return 64 if kind == "f64" else 32


def wmma_matrix_shape(w: InstructionInKernel) -> tuple[int, int, int]:
    """Rows, columns and bytes of an element of the matrix that wmma loads or stores."""
    m, n, k = _wmma_shape(w)
    which, kind = next(x for x in w.mods if x in "abcd"), w.mods[-1]
    if kind not in _BYTES:
        raise w.make_error(f"wmma of .{kind} is not supported")
    return *{"a": (m, k), "b": (k, n)}.get(which, (m, n)), _BYTES[kind]


def emit_wmma(w: OperandWriter) -> Writer:
    """wmma.load, wmma.store, wmma.mma."""
    if w.has_modifier("mma") and not w.has_modifier("popc"):
        return _emit_wmma_multiply(w)
    if not w.has_modifier("load", "store"):
        raise UnknownFormError
    (rows, columns, size), bits = wmma_matrix_shape(w), _register_bits_of_type(w.mods[-1])
    at, stride_at = (0, 2) if w.has_modifier("store") else (1, 2)
    dense = len(w.i.args) <= stride_at
    stride = (
        (lambda place: NOTHING) if dense else source_writer(w, w.require_operand(stride_at), 32)
    )
    items, address = w.operand_items(1 - at), address_writer(w, at)
    space = SPACE.get(state_space(w))
    if space is None:
        raise UnknownFormError
    shape = f"{rows}, {columns}, {int(w.has_modifier('col'))}, {size}"
    held = (
        _fragment_writer(w, items, "f64" if bits == 64 else "f32", 1)
        if at == 0
        else _results_writer(w, bits)
    )
    head = f"wmma_{'load' if at else 'store'}(c, '{space}', {w.frame.site_number(w.i)}"
    return lambda place: (
        f"{head}, &(Matrix){{{shape}, {stride(place)}, {int(dense)}}}, {bits // 8}, "
        f"{len(items)}, {held(place)}, {address(place)})"
    )


def _emit_wmma_multiply(w: OperandWriter) -> Writer:
    m, n, k = _wmma_shape(w)
    kinds = [x for x in w.mods if x in _BYTES]
    if len(kinds) == 2:  # .d.c of f16
        kinds = [kinds[0], "f16", "f16", kinds[1]]
    if len(kinds) != 4 or kinds[1] not in _ELEMENTS or kinds[2] not in _ELEMENTS:
        raise UnknownFormError
    counts = ", ".join(str(len(w.operand_items(at))) for at in range(4))
    parts = (
        _results_writer(w, _register_bits_of_type(kinds[0])),
        *(_fragment_writer(w, w.operand_items(at), kinds[at], 1) for at in (1, 2, 3)),
    )  # fmt: skip
    head = (
        f"wmma_multiply(c, {m}, {n}, {k}, E_{kinds[0].upper()}, "
        f"{int(w.has_modifier('satfinite'))}, (const int []){{{counts}}}"
    )
    return lambda place: ", ".join([head, *(part(place) for part in parts)]) + ")"


TENSOR: dict[str, Callable[[OperandWriter], Writer]] = {
    "mma": emit_mma,
    "ldmatrix": emit_ldmatrix,
    "wmma": emit_wmma,
}
