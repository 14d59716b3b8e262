"""Products of one token of each sequence: cuda/gemv.cu."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tinygrad.device import Buffer

from orinllm.file.ggml import KernelGgmlType
from orinllm.gpu.device import gemv_blocks_per_sm, multiprocessor_count
from orinllm.gpu.kernels.buffers import (
    FEW,
    PAGE,
    SHARED_MEMORY,
    LayerKvCache,
    PackedMatrix,
    SplitAttention,
    ceil_div,
    round_up,
)
from orinllm.gpu.launch import Argument, Constants, Launch

# Shared memory that the kernel itself takes beside what `shared_memory_bytes` counts.
_RESERVED = 256
# Weights that a warp takes at once (dot.cuh), and the weights of one activation scale.
_UNIT, _SCALED = 1024, 32
# Bytes of a quantized activation's scale, and of a copy of cp.async.
_FLOAT, _COPY = 4, 16
#: So few multiprocessors leave each warp a long stream, which rings of 3 units serve: on 16 of an
#: H200's a token of 8B takes 10.80 ms and 10.87 with 2 units, one of 1B 2.056 and 2.052.
FEW_SMS = 32
# An Orin's L2 has 256 KB for each multiprocessor: a quarter of it is asked for ahead.
_AHEAD_BYTES_PER_SM = 64 << 10


@dataclass(frozen=True)
class GemvPlan:
    """The spread of one product over the machine."""

    warps: int  # of a block
    rows_per_item: int  # a warp sums them together
    depth: int  # units of 1024 weights in a warp's ring; 0: they do not fit shared memory
    grid: int  # blocks


@dataclass(frozen=True)
class ArgmaxTailScratch:
    """Scratch of the head's argmax."""

    part_v: Buffer
    part_i: Buffer
    mail: Buffer | None = None  # mail.py
    signals: Buffer | None = (
        None  # of all joined launches (joined_launches.py): 0 when a token is over
    )


@dataclass(frozen=True)
class GemvProduct:
    """Matrices that meet the same activations: out (sequences, stride) = mode(W x)."""

    role: str
    mode: str  # STORE, ADD, GATED or ARGMAX (epilogue.cuh)
    weights: tuple[PackedMatrix, ...]
    out: Buffer
    x: Buffer
    state: Buffer  # tokens, positions, counters (attention.cu)
    biases: tuple[Buffer | None, ...] = ()
    norm: Buffer | None = None
    eps: float = 0.0
    factor: float = 1.0
    softcap: float = 0.0  # of ARGMAX: what is stored, 0: as it is
    activation: str = "SILU"
    sequences: int = 1
    first_row: int = 0  # of out
    stride: int = 0  # floats of a sequence's row of out
    parts: SplitAttention | None = None  # what x may still be in
    ahead: LayerKvCache | None = None  # what the next kernel reads
    tail: ArgmaxTailScratch | None = None

    @property
    def out_rows(self) -> int:
        """Rows of the result."""
        return self.weights[0].rows if self.mode == "GATED" else sum(w.rows for w in self.weights)

    @property
    def total_matrix_rows(self) -> int:
        """Rows of all matrices."""
        return sum(w.rows for w in self.weights)


def shared_memory_bytes(type_: KernelGgmlType, cols: int, plan: GemvPlan, columns: int) -> int:
    """Return the bytes of shared memory that a block takes."""
    padded = round_up(cols, _UNIT)
    activations = padded * type_.activation_bytes + padded // _SCALED * _FLOAT
    # A unit may start anywhere in its first 16 bytes; 16 more are spare.
    unit_bytes = _UNIT // type_.block_values * type_.block_bytes
    slot = round_up(unit_bytes + _COPY - 2, _COPY) + _COPY
    sums = round_up(plan.warps * columns, 4) * _FLOAT
    return activations * columns + sums + plan.warps * plan.depth * plan.rows_per_item * slot


def plan_gemv(
    device: str, mode: str, type_: KernelGgmlType, shape: tuple[int, int], columns: int = 1
) -> GemvPlan:
    """Plan a product of a matrix (rows, cols) with so many columns of activations."""
    sms = multiprocessor_count(device)
    gated, (total, cols) = mode == "GATED", shape
    # Two rows an item save activation loads, but only once every warp of the machine has an item.
    rows = 2 if gated or total >= 32 * sms else 1
    # A block quantizes its activations once for all its warps: more of them where rows are long.
    warp_counts = (16, 8, 4) if rows == 1 and cols >= 4096 else (8, 4)
    plan = GemvPlan(4, rows, 0, 0)
    for warps, rows_ in itertools.product(warp_counts, (rows,) if gated else range(rows, 0, -1)):
        for depth in range(3 if sms <= FEW_SMS else 2, 0, -1):
            tried = GemvPlan(warps, rows_, depth, 0)
            if shared_memory_bytes(type_, cols, tried, columns) <= SHARED_MEMORY - _RESERVED:
                grid = min(ceil_div(total, rows_ * warps), sms * gemv_blocks_per_sm(device))
                return replace(tried, grid=grid)
        plan = GemvPlan(warps, rows_, 0, 0)
    return plan


def fits_shared_memory(
    device: str, mode: str, type_: KernelGgmlType, shape: tuple[int, ...]
) -> bool:
    """Say whether a matrix's rows fit shared memory beside one column of activations."""
    return plan_gemv(device, mode, type_, (shape[0], shape[-1])).depth > 0


def gemv_launches(device: str, product: GemvProduct) -> Iterator[Launch]:
    """Yield the launches of a product.

    One for neighbours that meet the same activations, halves or int8, and for as many sequences as
    shared memory holds the activations of.
    """
    first_row = product.first_row
    stride = product.stride or product.out_rows
    biases = product.biases or (None,) * len(product.weights)
    pairs = zip(product.weights, biases, strict=True)
    for _, group in itertools.groupby(pairs, key=lambda pair: pair[0].type.activation_bytes):
        weights, group_biases = zip(*group, strict=True)
        part = replace(
            product, weights=weights, biases=group_biases, first_row=first_row, stride=stride
        )
        columns = sequences_per_launch(device, part)
        for at in range(0, product.sequences, columns):
            n = min(columns, product.sequences - at)
            ahead = None if first_row != product.first_row or at else product.ahead
            yield _gemv_launch(device, replace(part, ahead=ahead), at, n)
        first_row += part.out_rows


def sequences_per_launch(device: str, product: GemvProduct) -> int:
    """Return how many sequences' activations a launch takes; 0 if not even one's fit."""
    total = product.total_matrix_rows

    def all_fit(n: int) -> bool:
        plans = (
            plan_gemv(device, product.mode, w.type, (total, w.cols), n) for w in product.weights
        )
        return all(plan.depth for plan in plans)

    return next((n for n in range(product.sequences, 0, -1) if all_fit(n)), 0)


@dataclass(frozen=True)
class _MatrixGroup:
    """Neighbours of one type in a launch, and the number of the first."""

    weights: tuple[PackedMatrix, ...]
    plan: GemvPlan
    first: int


@dataclass(frozen=True)
class _KernelPiece:
    """A part of a launch that it may have: its arguments, constants and expression."""

    arguments: tuple[Argument, ...] = ()
    constants: tuple[Constants, ...] = ()
    expression: str = "Nothing{}"


def _gemv_launch(device: str, product: GemvProduct, first: int, columns: int) -> Launch:
    """Return the launch of `columns` sequences from `first` on."""
    p, groups = product, _matrix_groups(device, product, columns)
    plan, cols = groups[0].plan, p.weights[0].cols
    names = iter(f"P{i}" for i in itertools.count(len(groups)))
    source = _activation_piece(p, first, columns, names)
    ahead = _prefetch_piece(device, p, plan, names)
    tail = _argmax_piece(p, first, names)
    x, out = (_sequences_view(p, buffer, first, columns) for buffer in (p.x, p.out))
    pieces = (source, ahead, tail)
    optional = (
        *(() if p.norm is None else (Argument("const float* norm", p.norm),)),
        *(Argument(f"const u8* w{i}", weight.buffer) for i, weight in enumerate(p.weights)),
        *(Argument(f"const float* b{i}", b) for i, b in enumerate(p.biases) if b is not None),
        *((Argument("int* state", p.state),) if p.tail or p.parts or p.ahead else ()),
    )
    types = "_".join(dict.fromkeys(w.type.name.lower() for w in p.weights))
    some = f"_{first}_{columns}" if p.sequences > 1 else ""
    return Launch(
        name=f"gemv_{p.role}_{types}_{p.total_matrix_rows}x{cols}{some}",
        file="gemv.cu",
        constants=(
            *(_group_constants(p, group, columns) for group in groups),
            *(constants for piece in pieces for constants in piece.constants),
        ),
        arguments=(
            Argument("float* out", out),
            Argument("const float* x", x),
            *optional,
            *(argument for piece in pieces for argument in piece.arguments),
        ),
        body=_kernel_body(p, groups, pieces),
        grid=(plan.grid, 1, 1),
        block=plan.warps * 32,
        writes=("out", *_written_by_tail(p.tail)),
        operations=2 * p.total_matrix_rows * cols * columns,
        n_bytes=sum(w.n_bytes for w in p.weights),
        per_sm=max(1, 16 // plan.warps) if columns > 1 else 1,
        shared=max(shared_memory_bytes(g.weights[0].type, cols, g.plan, columns) for g in groups),
        step=p.role,
    )


def _matrix_groups(device: str, product: GemvProduct, columns: int) -> tuple[_MatrixGroup, ...]:
    """Return the groups of a launch, all for as many warps and blocks."""
    found, first = list[_MatrixGroup](), 0
    for _, group in itertools.groupby(product.weights, key=lambda weight: weight.type):
        weights = tuple(group)
        shape = (sum(w.rows for w in weights), weights[0].cols)
        plan = plan_gemv(device, product.mode, weights[0].type, shape, columns)
        found.append(_MatrixGroup(weights, plan, first))
        first += len(weights)
    warps, grid = min(g.plan.warps for g in found), max(g.plan.grid for g in found)
    return tuple(replace(g, plan=replace(g.plan, warps=warps, grid=grid)) for g in found)


def gemv_constants(
    type_: KernelGgmlType, cols: int, plan: GemvPlan, mode: str, activation: str
) -> Constants:
    """Return the part of P of gemv() that a plan says; the other fields are left to be set."""
    return Constants(
        type=type_.name,
        cols=cols,
        rows_per_item=plan.rows_per_item,
        depth=plan.depth,
        mode=mode,
        activation=activation,
        segments=1,
        warps=plan.warps,
        grid=plan.grid,
    )


def _group_constants(p: GemvProduct, group: _MatrixGroup, columns: int) -> Constants:
    first = group.weights[0]
    planned = gemv_constants(first.type, first.cols, group.plan, p.mode, p.activation)
    return Constants(
        planned
        | {
            "segments": len(group.weights),
            "norm": p.norm is not None,
            "columns": columns,
            "first_row": p.first_row + sum(w.rows for w in p.weights[: group.first]),
            "out_stride": p.stride,
            "softcap": p.softcap,
        }
    )


def _sequences_view(product: GemvProduct, buffer: Buffer, first: int, columns: int) -> Buffer:
    """Return the part of a buffer that belongs to these sequences."""
    if columns == product.sequences:
        return buffer
    size, n_bytes = (n // product.sequences for n in (buffer.size, buffer.nbytes))
    view = buffer.view(size * columns, buffer.dtype, n_bytes * first)
    return view.ensure_allocated()


def _activation_piece(
    p: GemvProduct, first: int, columns: int, names: Iterator[str]
) -> _KernelPiece:
    """Return where activations come from."""
    cols = p.weights[0].cols
    if p.parts is None:
        return _KernelPiece(expression="Plain<P0::COLS>{x}")
    heads, name = p.parts.heads, next(names)
    arguments = (
        Argument("const float* part", p.parts.part),
        Argument("const float* part_ml", p.parts.part_ml),
    )
    constants = Constants(
        cols=cols,
        head_dim=heads.attention.head_dim,
        splits=p.parts.splits,
        few=FEW,
        window=heads.attention.window,
        page=PAGE,
        columns=columns,
        first=first,
        sequences=p.sequences,
    )
    return _KernelPiece(arguments, (constants,), f"attended_by<{name}>(x, part, part_ml, state)")


def _prefetch_piece(
    device: str, p: GemvProduct, plan: GemvPlan, names: Iterator[str]
) -> _KernelPiece:
    """Return what is asked of memory ahead."""
    if p.ahead is None:
        return _KernelPiece()
    cache, heads, name = p.ahead, p.ahead.heads, next(names)
    attention = heads.attention
    token_bytes = 2 * heads.sequences * attention.kv_width * heads.kv.size
    arguments = (
        Argument(f"const {heads.kv.element}* cache", cache.buffer),
        Argument("const int* table", cache.table),
    )
    constants = Constants(
        element=heads.kv.element,
        head_dim=attention.head_dim,
        kv_heads=attention.kv_heads,
        page=PAGE,
        pages=heads.context // PAGE,
        window=attention.window,
        sequences=heads.sequences,
        tokens=multiprocessor_count(device) * _AHEAD_BYTES_PER_SM // token_bytes,
        threads=plan.warps * 32,
        grid=plan.grid,
    )
    expression = f"CacheAhead<{name}>{{cache, state + {name}::SEQUENCES, table, block}}"
    return _KernelPiece(arguments, (constants,), expression)


def _argmax_piece(p: GemvProduct, first: int, names: Iterator[str]) -> _KernelPiece:
    """Return the head's argmax."""
    if p.tail is None:
        return _KernelPiece()
    mail, signals, name = p.tail.mail, p.tail.signals, next(names)
    arguments = (
        Argument("float* part_v", p.tail.part_v),
        Argument("int* part_i", p.tail.part_i),
        *(() if mail is None else (Argument("int* mail", mail),)),
        *(() if signals is None else (Argument("int* signals", signals),)),
    )
    n_signals = 0 if signals is None else int(signals.size)
    constants = Constants(
        first=first, sequences=p.sequences, mailed=mail is not None, signals=n_signals
    )
    given = f"{0 if mail is None else 'mail'}, {0 if signals is None else 'signals'}"
    expression = f"tail_of<{name}>(best.of, part_v, part_i, state, {given})"
    return _KernelPiece(arguments, (constants,), expression)


def _written_by_tail(tail: ArgmaxTailScratch | None) -> tuple[str, ...]:
    """Return the arguments that the head's argmax writes."""
    if tail is None:
        return ()
    mail = () if tail.mail is None else ("mail",)
    signals = () if tail.signals is None else ("signals",)
    return ("part_v", "part_i", "state", *mail, *signals)


def _kernel_body(
    p: GemvProduct, groups: tuple[_MatrixGroup, ...], pieces: tuple[_KernelPiece, ...]
) -> str:
    """Return the kernel's body: the groups as data, and gemv.cu's function that takes them."""
    source, ahead, tail = (piece.expression for piece in pieces)
    lines = []
    for index, group in enumerate(groups):
        ids = range(group.first, group.first + len(group.weights))
        segments = ", ".join(f"{{w{i}, {p.weights[i].rows}}}" for i in ids)
        biases = ", ".join("0" if p.biases[i] is None else f"b{i}" for i in ids)
        lines.append(f"  const Group<P{index}> g{index} = {{{{{segments}}}, {{{biases}}}}};")
    norm = "0" if p.norm is None else "norm"
    named = ", ".join(f"g{i}" for i in range(len(groups)))
    lines += [
        "  Bests<P0::COLUMNS> best;",
        f"  const Gemvs gemvs = {{smem, out, {norm}, {p.eps!r}f, {p.factor!r}f, best.of, block}};",
        f"  all_groups(gemvs, {source}, {ahead}, before, {named});",
    ]
    if p.tail is not None:
        lines.append(f"  argmax_tail<P0>({tail});")
    return "\n".join(lines)
