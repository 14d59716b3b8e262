"""PTX on numpy: parse, compile to closures, run grids."""

from .compile import Code, compile_kernel
from .launch import Launch, Local, private_local
from .parse import parse
from .state import KernelFault
from .syntax import Kernel, Module, PtxError

__all__ = [
    "Code", "Kernel", "KernelFault", "Launch", "Local", "Module", "PtxError", "compile_kernel",
    "parse", "private_local",
]  # fmt: skip
