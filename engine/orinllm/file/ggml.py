"""The GGML types: sizes of their blocks, and the table of those that the kernels read."""

import re
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from pathlib import Path

CUDA = Path(__file__).parents[1] / "gpu/cuda"
_ROW = re.compile(r"^GGML_TYPE\((\w+), (\d+), (\d+), (\d+), (\d+), (\d+)\)$", re.MULTILINE)


class GgmlType(IntEnum):
    """Types that a tensor of a file may have: an id, and the weights and the bytes of a block.

    The `gguf` package has the same table, as a test checks; a start does not wait for its import.
    """

    block_values: int
    block_bytes: int

    def __new__(cls, number: int, block_values: int = 1, block_bytes: int = 1) -> "GgmlType":
        """Make a member of a line below; `GgmlType(number)` finds it."""
        member = int.__new__(cls, number)
        member._value_ = number
        member.block_values, member.block_bytes = block_values, block_bytes
        return member

    F32 = 0, 1, 4
    F16 = 1, 1, 2
    Q4_0 = 2, 32, 18
    Q4_1 = 3, 32, 20
    Q5_0 = 6, 32, 22
    Q5_1 = 7, 32, 24
    Q8_0 = 8, 32, 34
    Q8_1 = 9, 32, 40
    Q2_K = 10, 256, 84
    Q3_K = 11, 256, 110
    Q4_K = 12, 256, 144
    Q5_K = 13, 256, 176
    Q6_K = 14, 256, 210
    Q8_K = 15, 256, 292
    IQ2_XXS = 16, 256, 66
    IQ2_XS = 17, 256, 74
    IQ3_XXS = 18, 256, 98
    IQ1_S = 19, 256, 50
    IQ4_NL = 20, 32, 18
    IQ3_S = 21, 256, 110
    IQ2_S = 22, 256, 82
    IQ4_XS = 23, 256, 136
    I8 = 24, 1, 1
    I16 = 25, 1, 2
    I32 = 26, 1, 4
    I64 = 27, 1, 8
    F64 = 28, 1, 8
    IQ1_M = 29, 256, 56
    BF16 = 30, 1, 2
    TQ1_0 = 34, 256, 54
    TQ2_0 = 35, 256, 66
    MXFP4 = 39, 32, 17
    NVFP4 = 40, 64, 36
    Q1_0 = 41, 128, 18


@dataclass(frozen=True)
class KernelGgmlType:
    """A line of `cuda/ggml_types.h`."""

    name: str
    id: int
    block_values: int
    block_bytes: int
    activation_bytes: int  # 1: int8 in the GEMV; 2: halves
    alignment: int  # bytes that the start of each row is a multiple of


@cache
def kernel_ggml_types() -> dict[int, KernelGgmlType]:
    """Return the types that the kernels read, by GGML id."""
    rows = _ROW.findall((CUDA / "ggml_types.h").read_text())
    types = (KernelGgmlType(name, *map(int, numbers)) for name, *numbers in rows)
    return {type_.id: type_ for type_ in types}
