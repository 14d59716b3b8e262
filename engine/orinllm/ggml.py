"""The GGML types: sizes of their blocks, and the table of those that the kernels read."""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

CUDA = Path(__file__).parent / "cuda"
_ROW = re.compile(r"^GGML_TYPE\((\w+), (\d+), (\d+), (\d+), (\d+), (\d+)\)$", re.MULTILINE)


@dataclass(frozen=True)
class KernelType:
    """A line of `cuda/ggml_types.h`."""

    name: str
    id: int
    block_values: int
    block_bytes: int
    activation_bytes: int  # 1: int8 in the GEMV; 2: halves
    alignment: int  # bytes that the start of each row is a multiple of


@cache
def kernel_types() -> dict[int, KernelType]:
    """Return the types that the kernels read, by GGML id."""
    rows = _ROW.findall((CUDA / "ggml_types.h").read_text())
    types = (KernelType(name, *map(int, numbers)) for name, *numbers in rows)
    return {type_.id: type_ for type_ in types}
