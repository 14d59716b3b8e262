"""PTX: parse it, compile it to C, run grids of it."""

from .compile import KernelCode, compile_kernel
from .launch import Launch, LocalMemory, make_local_memory
from .parser.parse import parse
from .parser.syntax import Kernel, PtxError, PtxModule
from .state import KernelFault

__all__ = [
    "Kernel",
    "KernelCode",
    "KernelFault",
    "Launch",
    "LocalMemory",
    "PtxError",
    "PtxModule",
    "compile_kernel",
    "make_local_memory",
    "parse",
]  # fmt: skip
