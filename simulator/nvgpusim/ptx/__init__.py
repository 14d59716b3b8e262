"""PTX: parse it, compile it to C, run grids of it."""

from .compile import KernelCode, compile_kernel
from .launch import Launch, LocalMemory, make_private_local
from .parser.parse import parse
from .parser.syntax import Kernel, Module, PtxError
from .state import KernelFault

__all__ = [
    "Kernel",
    "KernelCode",
    "KernelFault",
    "Launch",
    "LocalMemory",
    "Module",
    "PtxError",
    "compile_kernel",
    "make_private_local",
    "parse",
]  # fmt: skip
