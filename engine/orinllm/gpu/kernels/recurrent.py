"""Layers that keep a state of each sequence: cuda/recurrent.cu."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tinygrad import dtypes
from tinygrad.device import Buffer

from orinllm.gpu.kernels.buffers import ceil_div, most_tokens
from orinllm.gpu.kernels.rows import count_of
from orinllm.gpu.launch import (
    ROW_THREADS,
    Constants,
    Given,
    Launch,
    launch_of,
    launch_of_rows,
    out_of,
)
from orinllm.network.layer import Convolve, Delta, Recurrence, Scan

# Threads that share a channel's tokens in a chunk; tokens in shared memory together.
_RANKS, _AT_ONCE = 8, 8
# Threads that have a column of a delta net's state, and a row of a Mamba-2's.
_COLUMN, _ROW = 2, 4
# Of a head's state a thread has so many floats in registers at most.
_MOST_DELTA, _MOST_WIDTH, _MOST_SCAN = 128, 256, 1024


def obstacle(operation: Recurrence) -> str | None:
    """Return why the kernels do not take a layer with a state, or None."""
    match operation:
        case Delta(size=size) if size % 32 or size > _MOST_DELTA:
            return f"heads of {size} dimensions; a multiple of 32 up to {_MOST_DELTA} was expected"
        case Scan(state=width) if width % (4 * _ROW) or width > _MOST_WIDTH:
            return f"states of {width}; a multiple of {4 * _ROW} up to {_MOST_WIDTH} was expected"
        case Scan(head_dim=size) if size % 8 or size * _ROW > _MOST_SCAN:
            most = _MOST_SCAN // _ROW
            return f"heads of {size} dimensions; a multiple of 8 up to {most} was expected"
    return None


@dataclass(frozen=True)
class Places:
    """The states of an operation, from the first slot's on, and who has which slot.

    count: sequences, whose positions are behind as many tokens in `state`; or a chunk.
    keeps: False leaves the states as they were.
    """

    states: Buffer
    slot_stride: int  # floats
    slots: Buffer  # int32, one a sequence
    state: Buffer  # attention.cu; of a chunk the chunk itself
    count: int | Buffer
    keeps: bool = True

    @property
    def sequences(self) -> int:
        """The second size of a grid."""
        return self.count if isinstance(self.count, int) else 1

    @property
    def chunk(self) -> bool:
        """Say whether tokens are those of a prompt's chunk."""
        return not isinstance(self.count, int)

    @property
    def tokens(self) -> int:
        """Tokens of a sequence at most."""
        return 1 if isinstance(self.count, int) else most_tokens(self.count)

    @property
    def arguments(self) -> Given:
        """The arguments of a kernel."""
        return {
            "float* states": self.states,
            "const int* slots": self.slots,
            "const int* at": self.state,
        }

    @property
    def expression(self) -> str:
        """The States of a kernel."""
        return f"{{states, slots, at{'' if self.chunk else f' + {self.count}'}}}"

    def constants(self, **more: int) -> Constants:
        """Return the part of P that Turn reads, and what else a kernel does."""
        states = {"chunk": self.chunk, "keeps": self.keeps, "slot_stride": self.slot_stride}
        return Constants(states | more)

    @property
    def writes(self) -> tuple[str, ...]:
        """The arguments that a kernel writes."""
        return ("out", "states") if self.keeps else ("out",)

    @property
    def at_once(self) -> int:
        """Tokens that are brought together."""
        return _AT_ONCE if self.chunk else 1


@dataclass(frozen=True)
class Rows:
    """A value that an operation reads: rows of floats, `stride` from one to the next."""

    buffer: Buffer
    stride: int


def _element(out: Buffer) -> str:
    return "u16" if out.dtype == dtypes.uint16 else "float"


def convolve(
    op: Convolve,
    places: Places,
    out: Buffer,
    rows: Rows,
    weight: Buffer,
    bias: Buffer | None,
) -> Launch:
    """Return a convolution: out (tokens, channels), floats or halves."""
    ranks = _RANKS if places.chunk else 1
    given = out_of(out) | {"const float* in": rows.buffer, "const float* weight": weight}
    constants = places.constants(
        channels=op.channels,
        taps=op.taps,
        first=op.first,
        stride=rows.stride,
        gated=op.gated,
        threads=ROW_THREADS,
        ranks=ranks,
    )
    launch = launch_of(
        "recurrent.cu convolve",
        f"{op.channels}x{op.taps}",
        constants,
        given | {"const float* bias": bias} | places.arguments,
        f"Convolution<{_element(out)}>{{out, in, weight, bias, {places.expression}}}",
        (ceil_div(op.channels, ROW_THREADS // ranks), places.sequences),
    )
    operations = 2 * op.channels * op.taps * places.sequences * places.tokens
    return replace(launch, writes=places.writes, operations=operations)


@dataclass(frozen=True)
class Gates:
    """The vectors of a layer with a state: ssm_a and ssm_dt.bias by head, ssm_norm, ssm_d."""

    decay: Buffer
    dt: Buffer
    norm: Buffer
    eps: float
    skip: Buffer | None = None


def delta(
    op: Delta, places: Places, out: Buffer, rows: tuple[Rows, Rows, Rows], gates: Gates
) -> Launch:
    """Return a gated delta net of rows of q, k, v, of z, and of gates: out (tokens, width)."""
    qkv, beside, gate_rows = rows
    assert qkv.stride == (2 * op.key_heads + op.heads) * op.size
    assert gate_rows.stride == 2 * op.heads
    given = out_of(out) | {"const float* in": qkv.buffer, "const float* beside": beside.buffer}
    given |= {"const float* gates": gate_rows.buffer, "const float* decay": gates.decay}
    given |= {"const float* dt": gates.dt, "const float* norm": gates.norm}
    constants = places.constants(
        heads=op.heads,
        key_heads=op.key_heads,
        size=op.size,
        first=op.first,
        stride=beside.stride,
        split=_COLUMN,
        at_once=places.at_once,
    )
    launch = launch_of(
        "recurrent.cu delta",
        f"{op.heads}x{op.size}",
        constants,
        given | places.arguments,
        f"DeltaNet<{_element(out)}>{{out, in, beside, gates, decay, dt, norm, "
        f"{places.expression}, {gates.eps!r}f}}",
        (op.heads, places.sequences),
    )
    operations = 8 * op.width * op.size * places.sequences * places.tokens
    block, writes = op.size * _COLUMN, places.writes
    return replace(launch, block=block, writes=writes, operations=operations, per_sm=2)


def scan(
    op: Scan, places: Places, outs: tuple[Buffer, Buffer], rows: tuple[Rows, Rows], gates: Gates
) -> Iterator[Launch]:
    """Yield a Mamba-2 of rows of x, B, C, and of z and dt: into outs[0], then normed to outs[1]."""
    (mixed, out), (xbc, beside) = outs, rows
    assert gates.skip is not None and xbc.stride == op.channels
    threads = op.head_dim * _ROW
    given: Given = {"float* out": mixed, "const float* in": xbc.buffer}
    given |= {"const float* beside": beside.buffer, "const float* decay": gates.decay}
    given |= {"const float* dt": gates.dt, "const float* skip": gates.skip}
    constants = places.constants(
        heads=op.heads,
        groups=op.groups,
        size=op.head_dim,
        width=op.state,
        stride=beside.stride,
        split=_ROW,
        at_once=places.at_once,
        threads=threads,
    )
    launch = launch_of(
        "recurrent.cu scan",
        f"{op.heads}x{op.head_dim}x{op.state}",
        constants,
        given | places.arguments,
        f"Mamba{{out, in, beside, decay, dt, skip, {places.expression}}}",
        (op.heads, places.sequences),
    )
    operations = 5 * op.width * op.state * places.sequences * places.tokens
    yield replace(launch, block=threads, writes=places.writes, operations=operations)
    count, most, more = count_of(places.count)
    cols = op.width // op.groups
    yield launch_of_rows(
        "recurrent.cu norm_groups",
        f"{op.groups}x{cols}",
        Constants(groups=op.groups, cols=cols, threads=ROW_THREADS),
        out_of(out) | {"const float* in": mixed, "const float* norm": gates.norm} | more,
        (gates.eps, count),
        (op.groups, most),
    )


def copy_states(states: Buffer, slot_stride: int, which: Buffer) -> Launch:
    """Return the copy of one slot's states, of all layers, to another: which[0] to which[1]."""
    return launch_of_rows(
        "recurrent.cu copy_states",
        slot_stride,
        Constants(slot_stride=slot_stride, threads=ROW_THREADS),
        {"float* states": states, "const int* which": which},
        (),
        (ceil_div(slot_stride, 4 * ROW_THREADS), 1),
    )
