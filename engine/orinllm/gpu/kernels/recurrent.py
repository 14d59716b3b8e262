"""Layers that keep a state of each sequence: cuda/recurrent.cu."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tinygrad.device import Buffer

from orinllm.gpu.kernels.buffers import ceil_div, chunk_capacity
from orinllm.gpu.kernels.rows import count_most_and_arguments
from orinllm.gpu.launch import (
    ROW_THREADS,
    Constants,
    Given,
    Launch,
    c_element_type,
    make_launch,
    make_rows_launch,
    out_argument,
)
from orinllm.network.layer import Convolve, GatedDeltaNet, Recurrence, SelectiveScan

# Threads that share a channel's tokens in a chunk; tokens in shared memory together.
_RANKS, _AT_ONCE = 8, 8
# Threads that have a column of a delta net's state, and a row of a Mamba-2's.
_COLUMN, _ROW = 2, 4
# Of a head's state a thread has so many floats in registers at most.
_MOST_DELTA, _MOST_WIDTH, _MOST_SCAN = 128, 256, 1024


def reason_unsupported(operation: Recurrence) -> str | None:
    """Return why the kernels do not take a layer with a state, or None."""
    match operation:
        case GatedDeltaNet(size=size) if size % 32 or size > _MOST_DELTA:
            return f"heads of {size} dimensions; a multiple of 32 up to {_MOST_DELTA} was expected"
        case SelectiveScan(state=width) if width % (4 * _ROW) or width > _MOST_WIDTH:
            return f"states of {width}; a multiple of {4 * _ROW} up to {_MOST_WIDTH} was expected"
        case SelectiveScan(head_dim=size) if size % 8 or size * _ROW > _MOST_SCAN:
            most = _MOST_SCAN // _ROW
            return f"heads of {size} dimensions; a multiple of 8 up to {most} was expected"
    return None


@dataclass(frozen=True)
class StatePlaces:
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
    def grid_sequences(self) -> int:
        """The second size of a grid."""
        return self.count if isinstance(self.count, int) else 1

    @property
    def is_chunk(self) -> bool:
        """Say whether tokens are those of a prompt's chunk."""
        return not isinstance(self.count, int)

    @property
    def most_tokens(self) -> int:
        """Tokens of a sequence at most."""
        return 1 if isinstance(self.count, int) else chunk_capacity(self.count)

    @property
    def arguments(self) -> Given:
        """The arguments of a kernel."""
        return {
            "float* states": self.states,
            "const int* slots": self.slots,
            "const int* at": self.state,
        }

    @property
    def states_expression(self) -> str:
        """The States of a kernel."""
        return f"{{states, slots, at{'' if self.is_chunk else f' + {self.count}'}}}"

    def constants(self, **more: int) -> Constants:
        """Return the part of P that Turn reads, and what else a kernel does."""
        states = {"chunk": self.is_chunk, "keeps": self.keeps, "slot_stride": self.slot_stride}
        return Constants(states | more)

    @property
    def written_arguments(self) -> tuple[str, ...]:
        """The arguments that a kernel writes."""
        return ("out", "states") if self.keeps else ("out",)

    @property
    def tokens_at_once(self) -> int:
        """Tokens that are brought together."""
        return _AT_ONCE if self.is_chunk else 1


@dataclass(frozen=True)
class StridedRows:
    """A value that an operation reads: rows of floats, `stride` from one to the next."""

    buffer: Buffer
    stride: int


def convolution_launch(
    op: Convolve,
    places: StatePlaces,
    out: Buffer,
    rows: StridedRows,
    weight: Buffer,
    bias: Buffer | None,
) -> Launch:
    """Return a convolution: out (tokens, channels), floats or halves."""
    ranks = _RANKS if places.is_chunk else 1
    given = out_argument(out) | {"const float* in": rows.buffer, "const float* weight": weight}
    constants = places.constants(
        channels=op.channels,
        taps=op.taps,
        first=op.first,
        stride=rows.stride,
        gated=op.gated,
        threads=ROW_THREADS,
        ranks=ranks,
    )
    launch = make_launch(
        "recurrent.cu convolve",
        f"{op.channels}x{op.taps}",
        constants,
        given | {"const float* bias": bias} | places.arguments,
        f"Convolution<{c_element_type(out)}>{{out, in, weight, bias, {places.states_expression}}}",
        (ceil_div(op.channels, ROW_THREADS // ranks), places.grid_sequences),
    )
    operations = 2 * op.channels * op.taps * places.grid_sequences * places.most_tokens
    return replace(launch, writes=places.written_arguments, operations=operations)


@dataclass(frozen=True)
class GateVectors:
    """The vectors of a layer with a state: ssm_a and ssm_dt.bias by head, ssm_norm, ssm_d."""

    decay: Buffer
    dt: Buffer
    norm: Buffer
    eps: float
    skip: Buffer | None = None


def delta_net_launch(
    op: GatedDeltaNet,
    places: StatePlaces,
    out: Buffer,
    rows: tuple[StridedRows, StridedRows, StridedRows],
    gates: GateVectors,
) -> Launch:
    """Return a gated delta net of rows of q, k, v, of z, and of gates: out (tokens, width)."""
    qkv, beside, gate_rows = rows
    assert qkv.stride == (2 * op.key_heads + op.heads) * op.size
    assert gate_rows.stride == 2 * op.heads
    given = out_argument(out) | {
        "const float* in": qkv.buffer,
        "const float* beside": beside.buffer,
    }
    given |= {"const float* gates": gate_rows.buffer, "const float* decay": gates.decay}
    given |= {"const float* dt": gates.dt, "const float* norm": gates.norm}
    constants = places.constants(
        heads=op.heads,
        key_heads=op.key_heads,
        size=op.size,
        first=op.first,
        stride=beside.stride,
        split=_COLUMN,
        at_once=places.tokens_at_once,
    )
    launch = make_launch(
        "recurrent.cu delta",
        f"{op.heads}x{op.size}",
        constants,
        given | places.arguments,
        f"DeltaNet<{c_element_type(out)}>{{out, in, beside, gates, decay, dt, norm, "
        f"{places.states_expression}, {gates.eps!r}f}}",
        (op.heads, places.grid_sequences),
    )
    operations = 8 * op.output_width * op.size * places.grid_sequences * places.most_tokens
    block, writes = op.size * _COLUMN, places.written_arguments
    return replace(launch, block=block, writes=writes, operations=operations, per_sm=2)


def mamba2_launches(
    op: SelectiveScan,
    places: StatePlaces,
    outs: tuple[Buffer, Buffer],
    rows: tuple[StridedRows, StridedRows],
    gates: GateVectors,
) -> Iterator[Launch]:
    """Yield a Mamba-2 of rows of x, B, C, and of z and dt: into outs[0], then normed to outs[1]."""
    (mixed, out), (xbc, beside) = outs, rows
    assert gates.skip is not None and xbc.stride == op.input_width
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
        at_once=places.tokens_at_once,
        threads=threads,
    )
    launch = make_launch(
        "recurrent.cu scan",
        f"{op.heads}x{op.head_dim}x{op.state}",
        constants,
        given | places.arguments,
        f"Mamba{{out, in, beside, decay, dt, skip, {places.states_expression}}}",
        (op.heads, places.grid_sequences),
    )
    operations = 5 * op.output_width * op.state * places.grid_sequences * places.most_tokens
    yield replace(launch, block=threads, writes=places.written_arguments, operations=operations)
    count, most, more = count_most_and_arguments(places.count)
    cols = op.output_width // op.groups
    yield make_rows_launch(
        "recurrent.cu norm_groups",
        f"{op.groups}x{cols}",
        Constants(groups=op.groups, cols=cols, threads=ROW_THREADS),
        out_argument(out) | {"const float* in": mixed, "const float* norm": gates.norm} | more,
        (gates.eps, count),
        (op.groups, most),
    )


def copy_states_launch(states: Buffer, slot_stride: int, which: Buffer) -> Launch:
    """Return the copy of one slot's states, of all layers, to another: which[0] to which[1]."""
    return make_rows_launch(
        "recurrent.cu copy_states",
        slot_stride,
        Constants(slot_stride=slot_stride, threads=ROW_THREADS),
        {"float* states": states, "const int* which": which},
        (),
        (ceil_div(slot_stride, 4 * ROW_THREADS), 1),
    )
