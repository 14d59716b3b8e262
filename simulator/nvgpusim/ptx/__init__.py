"""PTX: parse it, compile it to C, run grids of it."""

from .launch import Launch, LocalMemory, make_local_memory
from .parser.parse import parse
from .parser.syntax import Kernel, PtxError, PtxModule
from .state import KernelFault
from .translate import KernelCode, translate_kernel

__all__ = [
    "Kernel",
    "KernelCode",
    "KernelFault",
    "Launch",
    "LocalMemory",
    "PtxError",
    "PtxModule",
    "make_local_memory",
    "parse",
    "translate_kernel",
]  # fmt: skip
