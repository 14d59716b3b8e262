"""Products of one token of each sequence: cuda/gemv.cu."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tinygrad.device import Buffer

from orinllm.device import blocks_per_sm, multiprocessors
from orinllm.ggml import KernelType
from orinllm.launch import Argument, Constants, Launch
from orinllm.launches.buffers import (
    FEW,
    PAGE,
    SHARED_MEMORY,
    Cache,
    Parts,
    Weight,
    ceil_div,
    round_up,
)

# Shared memory that the kernel itself takes beside what `shared_memory` counts.
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
class GemvConstants(Constants):
    """P of gemv()."""

    type: str
    cols: int
    rows_per_item: int
    depth: int
    mode: str
    activation: str
    segments: int
    warps: int
    grid: int
    norm: bool
    columns: int
    out_stride: int


@dataclass(frozen=True)
class AttendedConstants(Constants):
    """P of attended_by()."""

    cols: int
    head_dim: int
    splits: int
    few: int
    window: int
    page: int
    columns: int


@dataclass(frozen=True)
class AheadConstants(Constants):
    """P of CacheAhead."""

    element: str
    head_dim: int
    kv_heads: int
    page: int
    pages: int
    window: int
    sequences: int
    tokens: int
    threads: int
    grid: int


@dataclass(frozen=True)
class GemvPlan:
    """The spread of one product over the machine."""

    warps: int  # of a block
    rows_per_item: int  # a warp sums them together
    depth: int  # units of 1024 weights in a warp's ring; 0: they do not fit shared memory
    grid: int  # blocks


@dataclass(frozen=True)
class Tail:
    """Scratch of the head's argmax."""

    part_v: Buffer
    part_i: Buffer
    mail: Buffer | None = None  # mail.py
    signals: Buffer | None = None  # of all joined launches (joined.py): 0 when a token is over


@dataclass(frozen=True)
class Product:
    """Matrices that meet the same activations: out (sequences, stride) = mode(W x)."""

    role: str
    mode: str  # STORE, ADD, GATED or ARGMAX (epilogue.cuh)
    weights: tuple[Weight, ...]
    out: Buffer
    x: Buffer
    state: Buffer  # tokens, positions, counters (attention.cu)
    biases: tuple[Buffer | None, ...] = ()
    norm: Buffer | None = None
    eps: float = 0.0
    factor: float = 1.0
    activation: str = "SILU"
    sequences: int = 1
    first_row: int = 0  # of out
    stride: int = 0  # floats of a sequence's row of out
    parts: Parts | None = None  # what x may still be in
    ahead: Cache | None = None  # what the next kernel reads
    tail: Tail | None = None

    @property
    def rows(self) -> int:
        """Rows of the result."""
        return self.weights[0].rows if self.mode == "GATED" else sum(w.rows for w in self.weights)

    @property
    def read_rows(self) -> int:
        """Rows of all matrices."""
        return sum(w.rows for w in self.weights)


def shared_memory(type_: KernelType, cols: int, plan: GemvPlan, columns: int) -> int:
    """Return the bytes of shared memory that a block takes."""
    padded = round_up(cols, _UNIT)
    activations = padded * type_.activation_bytes + padded // _SCALED * _FLOAT
    # A unit may start anywhere in its first 16 bytes; 16 more are spare.
    unit_bytes = _UNIT // type_.block_values * type_.block_bytes
    slot = round_up(unit_bytes + _COPY - 2, _COPY) + _COPY
    sums = round_up(plan.warps * columns, 4) * _FLOAT
    return activations * columns + sums + plan.warps * plan.depth * plan.rows_per_item * slot


def plan_gemv(
    device: str, mode: str, type_: KernelType, shape: tuple[int, int], columns: int = 1
) -> GemvPlan:
    """Plan a product of a matrix (rows, cols) with so many columns of activations."""
    sms = multiprocessors(device)
    gated, (total, cols) = mode == "GATED", shape
    # Two rows an item save activation loads, but only once every warp of the machine has an item.
    rows = 2 if gated or total >= 32 * sms else 1
    # A block quantizes its activations once for all its warps: more of them where rows are long.
    warp_counts = (16, 8, 4) if rows == 1 and cols >= 4096 else (8, 4)
    plan = GemvPlan(4, rows, 0, 0)
    for warps, rows_ in itertools.product(warp_counts, (rows,) if gated else range(rows, 0, -1)):
        for depth in range(3 if sms <= FEW_SMS else 2, 0, -1):
            tried = GemvPlan(warps, rows_, depth, 0)
            if shared_memory(type_, cols, tried, columns) <= SHARED_MEMORY - _RESERVED:
                grid = min(ceil_div(total, rows_ * warps), sms * blocks_per_sm(device))
                return replace(tried, grid=grid)
        plan = GemvPlan(warps, rows_, 0, 0)
    return plan


def fits(device: str, mode: str, type_: KernelType, shape: tuple[int, ...]) -> bool:
    """Say whether a matrix's rows fit shared memory beside one column of activations."""
    return plan_gemv(device, mode, type_, (shape[0], shape[-1])).depth > 0


def products(device: str, product: Product) -> Iterator[Launch]:
    """Yield the launches of a product.

    One for neighbours that meet the same activations, halves or int8, and for as many sequences as
    shared memory holds the activations of.
    """
    first_row = product.first_row
    stride = product.stride or product.rows
    biases = product.biases or (None,) * len(product.weights)
    pairs = zip(product.weights, biases, strict=True)
    for _, group in itertools.groupby(pairs, key=lambda pair: pair[0].type.activation_bytes):
        weights, group_biases = zip(*group, strict=True)
        part = replace(
            product, weights=weights, biases=group_biases, first_row=first_row, stride=stride
        )
        columns = columns_at_once(device, part)
        for at in range(0, product.sequences, columns):
            n = min(columns, product.sequences - at)
            ahead = None if first_row != product.first_row or at else product.ahead
            yield _launch(device, replace(part, ahead=ahead), at, n)
        first_row += part.rows


def columns_at_once(device: str, product: Product) -> int:
    """Return how many sequences' activations a launch takes; 0 if not even one's fit."""
    total = product.read_rows

    def all_fit(n: int) -> bool:
        plans = (
            plan_gemv(device, product.mode, w.type, (total, w.cols), n) for w in product.weights
        )
        return all(plan.depth for plan in plans)

    return next((n for n in range(product.sequences, 0, -1) if all_fit(n)), 0)


def _launch(device: str, product: Product, first: int, columns: int) -> Launch:
    """Return the launch of `columns` sequences from `first` on."""
    groups = [tuple(group) for _, group in itertools.groupby(product.weights, key=lambda w: w.type)]
    plans = [
        plan_gemv(
            device,
            product.mode,
            group[0].type,
            (sum(w.rows for w in group), group[0].cols),
            columns,
        )
        for group in groups
    ]
    warps, grid = min(plan.warps for plan in plans), max(plan.grid for plan in plans)
    plans = [replace(plan, warps=warps, grid=grid) for plan in plans]
    writer = _Writer(device, product, first, columns, warps, grid)
    shared = max(
        shared_memory(group[0].type, group[0].cols, plan, columns)
        for group, plan in zip(groups, plans, strict=True)
    )
    writer.open()
    for group, plan in zip(groups, plans, strict=True):
        writer.group(group, plan)
    return writer.close(shared)


class _Writer:
    """Puts one launch together: its arguments, constants and body."""

    def __init__(
        self, device: str, product: Product, first: int, columns: int, warps: int, grid: int
    ) -> None:
        self.device, self.product = device, product
        self.first, self.columns, self.warps, self.grid = first, columns, warps, grid
        self.constants: list[Constants] = []
        self.body: list[str] = []
        self.row, self.matrix = product.first_row, 0
        p = product
        self.arguments = [
            Argument("float* out", self._columns_of(p.out)),
            Argument("const float* x", self._columns_of(p.x)),
        ]
        if p.norm is not None:
            self.arguments.append(Argument("const float* norm", p.norm))
        for i, weight in enumerate(p.weights):
            self.arguments.append(Argument(f"const u8* w{i}", weight.buffer))
        for i, bias in enumerate(p.biases):
            if bias is not None:
                self.arguments.append(Argument(f"const float* b{i}", bias))
        if p.tail or p.parts or p.ahead:
            self.arguments.append(Argument("int* state", p.state))
        self.source = self._source()
        self.ahead = self._ahead()

    def _columns_of(self, buffer: Buffer) -> Buffer:
        """Return the part of a buffer that belongs to the launch's sequences."""
        if self.columns == self.product.sequences:
            return buffer
        size, n_bytes = (n // self.product.sequences for n in (buffer.size, buffer.nbytes))
        view = buffer.view(size * self.columns, buffer.dtype, n_bytes * self.first)
        return view.ensure_allocated()

    def _add_constants(self, constants: Constants) -> str:
        self.constants.append(constants)
        return f"P{len(self.constants) - 1}"

    def _source(self) -> str:
        """Return the expression of where activations come from."""
        p, cols = self.product, self.product.weights[0].cols
        if p.parts is None:
            return f"Plain<{cols}>{{x}}"
        heads, splits = p.parts.heads, p.parts.splits
        dim = heads.attention.head_dim
        self.arguments += [
            Argument("const float* part", p.parts.part),
            Argument("const float* part_ml", p.parts.part_ml),
        ]
        name = self._add_constants(
            AttendedConstants(cols, dim, splits, FEW, heads.attention.window, PAGE, self.columns)
        )
        head = self.first * cols // dim * splits  # the first part of these sequences
        return (
            f"attended_by<{name}>(x, part + {head * dim}, part_ml + {head * 2}, "
            f"state + {p.sequences + self.first})"
        )

    def _ahead(self) -> str:
        """Return the expression of what is asked of memory ahead."""
        if self.product.ahead is None:
            return "Nothing{}"
        cache, heads = self.product.ahead, self.product.ahead.heads
        attention = heads.attention
        self.arguments += [
            Argument(f"const {heads.kv.element}* cache", cache.buffer),
            Argument("const int* table", cache.table),
        ]
        elements = 2 * heads.sequences * attention.kv_heads * attention.head_dim
        token_bytes = elements * heads.kv.dtype.itemsize
        name = self._add_constants(
            AheadConstants(
                element=heads.kv.element,
                head_dim=attention.head_dim,
                kv_heads=attention.kv_heads,
                page=PAGE,
                pages=heads.context // PAGE,
                window=attention.window,
                sequences=heads.sequences,
                tokens=multiprocessors(self.device) * _AHEAD_BYTES_PER_SM // token_bytes,
                threads=self.warps * 32,
                grid=self.grid,
            )
        )
        return f"CacheAhead<{name}>{{cache, state + {heads.sequences}, table, block}}"

    def open(self) -> None:
        """Begin the body."""
        best = ", ".join(["{NEG_INF, NO_ROW}"] * self.columns)
        self.body.append(f"  Best best[] = {{{best}}};")

    def group(self, weights: Sequence[Weight], plan: GemvPlan) -> None:
        """Add the product of neighbours of one type."""
        p = self.product
        if self.matrix:
            self.body.append("  __syncthreads();")
        ids = range(self.matrix, self.matrix + len(weights))
        name = self._add_constants(
            GemvConstants(
                type=weights[0].type.name,
                cols=weights[0].cols,
                rows_per_item=plan.rows_per_item,
                depth=plan.depth,
                mode=p.mode,
                activation=p.activation,
                segments=len(weights),
                warps=plan.warps,
                grid=plan.grid,
                norm=p.norm is not None,
                columns=self.columns,
                out_stride=p.stride,
            )
        )
        segments = ", ".join(f"{{w{i}, {p.weights[i].rows}}}" for i in ids)
        biases = ", ".join("0" if p.biases[i] is None else f"b{i}" for i in ids)
        ahead, self.ahead = self.ahead, "Nothing{}"
        norm = "norm" if p.norm is not None else "0"
        self.body += [
            "  {",
            f"    const Seg seg[] = {{{segments}}};",
            f"    const float* const bias[] = {{{biases}}};",
            f"    const auto from = {self.source};",
            f"    const auto ahead = {ahead};",
            f"    gemv<{name}>(Gemv<decltype(from), decltype(ahead), decltype(before)>{{smem, "
            f"out + {self.row}, from, {norm}, seg, bias, {p.eps!r}f, {p.factor!r}f, best, ahead, "
            "before, block});",
            "  }",
        ]
        self.matrix += len(weights)
        self.row += sum(w.rows for w in weights)

    def close(self, shared: int) -> Launch:
        """Return the launch."""
        p, writes = self.product, ["out"]
        if p.tail is not None:
            self.arguments += [
                Argument("float* part_v", p.tail.part_v),
                Argument("int* part_i", p.tail.part_i),
            ]
            writes += ["part_v", "part_i", "state"]
            if p.tail.mail is not None:
                self.arguments.append(Argument("int* mail", p.tail.mail))
                writes.append("mail")
            if p.tail.signals is not None:
                self.arguments.append(Argument("int* signals", p.tail.signals))
                writes.append("signals")
            self.body.append(_tail(self))
        cols, n = p.weights[0].cols, self.columns
        types = "_".join(dict.fromkeys(w.type.name.lower() for w in p.weights))
        name = f"gemv_{p.role}_{types}_{p.read_rows}x{cols}"
        if p.sequences > 1:
            name += f"_{self.first}_{n}"
        return Launch(
            name=name,
            file="gemv.cu",
            constants=tuple(self.constants),
            arguments=tuple(self.arguments),
            body="\n".join(self.body),
            grid=(self.grid, 1, 1),
            block=self.warps * 32,
            writes=tuple(writes),
            operations=2 * p.read_rows * cols * n,
            n_bytes=sum(w.n_bytes for w in p.weights),
            per_sm=max(1, 16 // self.warps) if n > 1 else 1,
            shared=shared,
            step=p.role,
        )


def _tail(writer: _Writer) -> str:
    """Return the lines of the head's argmax; state is as in attention.cu."""
    n, first, sequences = writer.columns, writer.first, writer.product.sequences
    warps = writer.warps
    tail = writer.product.tail
    mail = "0" if tail is None or tail.mail is None else f"mail + {2 * first}"
    signals = "0, 0" if tail is None or tail.signals is None else f"signals, {tail.signals.size}"
    return (
        f"  __shared__ float sv[{warps * n}];\n"
        f"  __shared__ int si[{warps * n}], flag;\n"
        f"  argmax_tail<P{len(writer.constants) - 1}>(Tail{{best, part_v, part_i, state + {first}, "
        f"state + {sequences + first}, state + {2 * sequences}, {mail}, {signals}}}, sv, si, "
        "&flag);"
    )
