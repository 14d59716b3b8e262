"""Kernels as data: the constants, arguments and shape of a launch, and what tinygrad runs of it.

A launch's constants become those of a CUDA struct, so that `rows_per_item=2` in Python is
`P::ROWS_PER_ITEM` in cuda/*.cu.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

from tinygrad import Device, dtypes
from tinygrad.device import Buffer
from tinygrad.engine.jit import create_graph_call
from tinygrad.engine.realize import get_graph_runtime, run_linear
from tinygrad.helpers import JIT
from tinygrad.renderer import Estimates
from tinygrad.uop.ops import KernelInfo, Ops, ProgramInfo, UOp

import orinllm.gpu.thread_safe_kernel_cache  # noqa: F401
from orinllm.file.ggml import CUDA
from orinllm.gpu.device import compile_cuda

_INCLUDE = re.compile(r'^#include "([\w.]+)"$', re.MULTILINE)
# Blocks of so many threads on one multiprocessor leave 128 registers a thread; BOUNDS_126 in
# cuda/gpu.cuh says why the bound is 126.
_TWO_OF_256 = 512
#: Threads of a block that computes elements of rows.
ROW_THREADS = 256
#: Buffers by the C declaration of their argument; None: the argument is left out.
Given = dict[str, Buffer | None]


# What the body of a launch without parts has for the number of its block and whom it waits for.
ALONE = "  const int block = blockIdx.x;\n  const Nobody before{};\n"


def shared_memory_declaration(n: int) -> str:
    """Return the declaration of `smem`."""
    return f"  __shared__ u8 __align__(16) smem[{n}];\n"


class Constants(dict[str, bool | int | float | str]):
    """A launch's constants by name. A str is a name of cuda/*, such as Q6_K or STORE."""

    def cuda_struct(self, name: str) -> str:
        """Return the CUDA struct `name`."""
        lines = []
        for key, value in self.items():
            if key == "element":
                lines.append(f"  typedef {value} Element;")
                continue
            kind, shown = "int", value
            if isinstance(value, bool):
                kind, shown = "bool", str(value).lower()
            elif isinstance(value, float):
                kind, shown = "float", f"{value!r}f"
            lines.append(f"  static constexpr {kind} {key.upper()} = {shown};")
        return "\n".join([f"struct {name} {{", *lines, "};"])


@dataclass(frozen=True)
class Argument:
    """A pointer that a kernel is given: its C declaration and the buffer behind it."""

    declaration: str
    buffer: Buffer = field(compare=False)

    @property
    def name(self) -> str:
        """The parameter's name."""
        return self.declaration.rsplit(None, 1)[1]

    @property
    def type(self) -> str:
        """The parameter's type."""
        return self.declaration.rsplit(None, 1)[0]


@dataclass(frozen=True)
class Launch:
    """One kernel of a list: its code, its arguments and its shape."""

    name: str
    file: str  # of cuda/
    constants: tuple[Constants, ...]  # P0, P1, ... in the body
    arguments: tuple[Argument, ...]
    body: str
    grid: tuple[int, int, int]
    block: int  # threads
    writes: tuple[str, ...]  # names of the arguments that it writes
    operations: int = 0  # floating-point, for tinygrad's estimates
    n_bytes: int = 0  # of weights that it reads
    per_sm: int = 1  # blocks that must fit a multiprocessor: bounds the registers
    shared: int = 0  # bytes of `smem`
    step: str = ""  # a name, of what may be a part of a launch (joined_launches.py)

    @property
    def cuda_source(self) -> str:
        """All of the CUDA C that the compiler sees."""
        bounds = "BOUNDS_126" if self.block * self.per_sm == _TWO_OF_256 else "__launch_bounds__"
        parameters = ", ".join(argument.declaration for argument in self.arguments)
        structs = "\n".join(c.cuda_struct(f"P{i}") for i, c in enumerate(self.constants))
        own = f"{shared_memory_declaration(self.shared)}{ALONE}" if self.shared else ""
        return (
            f"{source_with_includes(self.file)}\n{structs}\n"
            f'extern "C" __global__ void {bounds}({self.block}, {self.per_sm}) '
            f"{self.name}({parameters}) {{\n{own}{self.body}\n}}\n"
        )

    @property
    def outline(self) -> "LaunchOutline":
        """The launch without code and buffers, as a compiled program keeps it."""
        names = [argument.name for argument in self.arguments]
        written = tuple(names.index(name) for name in self.writes)
        estimates = Estimates(self.operations, self.n_bytes, self.n_bytes)
        return LaunchOutline(self.name, self.grid, self.block, len(names), written, estimates)


def make_arguments(given: Given) -> tuple[Argument, ...]:
    """Return the arguments of C declarations, of which those without a buffer are left out."""
    return tuple(Argument(at, buffer) for at, buffer in given.items() if buffer is not None)


def kernel_body(call: str, given: Given) -> str:
    """Return the body of a kernel: a call of a function, to which arguments left out are 0."""
    absent = [at.rsplit(None, 1)[1] for at, buffer in given.items() if buffer is None]
    shown = re.sub(rf"\b({'|'.join(absent)})\b", "0", call) if absent else call
    return f"  {shown};"


def c_element_type(buffer: Buffer) -> str:
    """Return the C type of a buffer's halves or floats."""
    return "u16" if buffer.dtype == dtypes.uint16 else "float"


def out_argument(buffer: Buffer) -> Given:
    """Return the argument of what is written in halves or floats, as the buffer is."""
    return {f"{c_element_type(buffer)}* out": buffer}


def make_launch(
    kernel: str, label: object, constants: Constants, given: Given, call: str, grid: tuple[int, int]
) -> Launch:
    """Return a launch of ROW_THREADS threads a block that writes its first argument.

    `kernel` is a file of cuda/ and a function of it, `call` what that takes; `label` is what the
    launch's name has behind the function's.
    """
    file, function = kernel.split()
    arguments = make_arguments(given)
    return Launch(
        name=f"{function}_{label}",
        file=file,
        constants=(constants,),
        arguments=arguments,
        body=kernel_body(f"{function}<P0>({call})", given),
        grid=(*grid, 1),
        block=ROW_THREADS,
        writes=(arguments[0].name,),
    )


def make_rows_launch(
    kernel: str,
    label: object,
    constants: Constants,
    given: Given,
    more: Sequence[float | str],
    grid: tuple[int, int],
) -> Launch:
    """Return a launch whose function takes all arguments, and then `more`.

    Where that says how many rows the chunk has, the chunk itself is not taken.
    """
    counted = "const int* chunk" if "chunk[1]" in more else ""
    names = [at.rsplit(None, 1)[1] for at in given if at != counted]
    shown = [f"{value!r}f" if isinstance(value, float) else value for value in more]
    return make_launch(kernel, label, constants, given, ", ".join([*names, *shown]), grid)


@dataclass(frozen=True)
class LaunchOutline:
    """A launch without code and buffers."""

    name: str
    grid: tuple[int, int, int]
    block: int
    n_arguments: int
    written: tuple[int, ...]
    estimates: Any


@cache
def source_with_includes(file: str) -> str:
    """Return a file of cuda/ with its includes in place, each header once where it says so."""
    seen: set[str] = set()

    def resolve(name: str) -> str:
        text = (CUDA / name).read_text()
        if "#pragma once" in text:
            if name in seen:
                return ""
            seen.add(name)
            text = text.replace("#pragma once\n", "")
        return _INCLUDE.sub(lambda match: resolve(match[1]), text)

    return resolve(file)


@cache
def _program_uop(device: str, source: str, shape: LaunchOutline) -> UOp:
    arguments = tuple(range(shape.n_arguments))
    info = ProgramInfo(
        shape.name, shape.grid, (shape.block, 1, 1), (), arguments, shape.written, arguments
    )
    sink = UOp(Ops.SINK, dtypes.void, (), KernelInfo(name=shape.name, estimates=shape.estimates))
    parts = (
        sink,
        UOp(Ops.DEVICE, arg=device),
        UOp(Ops.LINEAR, dtypes.void, ()),
        UOp(Ops.SOURCE, arg=source),
        UOp(Ops.BINARY, arg=compile_cuda(device, source)),
    )
    return UOp(Ops.PROGRAM, dtypes.void, parts, arg=info)


class LaunchGraph:
    """Launches in their order, as one graph launch where the device has graphs.

    turns: runs that may be under way at once. HCQ waits for a graph's last run before it starts it
    anew, so each of them has a graph of its own. `seen` is called with a launch's number when it is
    started; launches then go one by one.
    """

    seen: Callable[[int], None] | None = None

    def __init__(self, device: str, launches: Sequence[Launch], turns: int = 1) -> None:
        self._device, self.launches = device, tuple(launches)
        self._linears: list[UOp] = [self._make_linear()]
        self._turns, self._runs = turns, 0

    @property
    def first_turn_linear(self) -> UOp:
        """The calls that tinygrad runs in the first turn."""
        return self._linears[0]

    def _make_calls(self) -> list[UOp]:
        device, uops = self._device, dict[int, UOp]()

        def uop(buffer: Buffer) -> UOp:
            if id(buffer) not in uops:
                uops[id(buffer)] = UOp.from_buffer(buffer)
            return uops[id(buffer)]

        return [
            _program_uop(device, launch.cuda_source, launch.outline).call(
                *(uop(argument.buffer) for argument in launch.arguments)
            )
            for launch in self.launches
        ]

    @cached_property
    def _watched_calls(self) -> list[UOp]:
        return self._make_calls()

    def _make_linear(self) -> UOp:
        # Calls of its own: tinygrad would give turns with the same ones the same graph.
        calls, graphed = self._make_calls(), Device[self._device].graph is not None and JIT == 1
        return UOp(
            Ops.LINEAR, dtypes.void, (create_graph_call(calls),) if graphed else tuple(calls)
        )

    def load_programs(self) -> None:
        """Load the programs of the first turn and make its graph, which `start` would else do."""
        for call in self.first_turn_linear.src:
            if call.src[0].op is Ops.CUSTOM_FUNCTION:
                get_graph_runtime(call.src[0], ())

    def start(self) -> None:
        """Start the launches; nothing is waited for but more than `turns` runs."""
        if self.seen is not None:
            for number, call in enumerate(self._watched_calls):
                run_linear(UOp(Ops.LINEAR, dtypes.void, (call,)), jit=True)
                self.seen(number)
            return
        turn = self._runs % self._turns
        if turn == len(self._linears):
            self._linears.append(self._make_linear())
        self._runs += 1
        run_linear(self._linears[turn], jit=True)
