"""PTX: parse it, compile it to C, run grids of it."""

from .compile import Code, compile_kernel
from .launch import Launch, Local, private_local
from .parser.parse import parse
from .parser.syntax import Kernel, Module, PtxError
from .state import KernelFault

__all__ = [
    "Code", "Kernel", "KernelFault", "Launch", "Local", "Module", "PtxError", "compile_kernel",
    "parse", "private_local",
]  # fmt: skip
