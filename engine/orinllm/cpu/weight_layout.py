"""The way a matrix lies in a CPU's memory: as in the file, or as 16-bit floats.

cpu/packed.c reads the types of `PACKED` where the file is mapped; all others are made floats.
"""

from orinllm.file.ggml import GgmlType
from orinllm.file.gguf import GGUF, TensorInfo
from orinllm.network.config import Config

_NAMES = "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS MXFP4"
#: The types that cpu/packed.c reads.
PACKED = frozenset(GgmlType[name] for name in _NAMES.split())


def is_read_in_place(tensor: TensorInfo) -> bool:
    """Say whether a matrix is read where the file is mapped."""
    return tensor.type in PACKED or tensor.type == GgmlType.F16


def row_bytes(tensor: TensorInfo) -> int:
    """Return the bytes of a row of a matrix in a CPU's memory."""
    if not is_read_in_place(tensor):
        return 2 * tensor.shape[-1]
    return tensor.n_bytes // (tensor.n_elements // tensor.shape[-1])


#: Embeddings by layer, of which a token reads one row: they stay in the file, whatever their type.
LAYER_TABLE = "per_layer_token_embd.weight"


def model_weight_bytes(gguf: GGUF, config: Config) -> int:
    """Return the bytes that the weights of a model take in a CPU's memory."""
    names = (n for n in gguf.tensors if n != LAYER_TABLE and not config.is_in_other_block(n))
    held = (gguf.tensors[name] for name in names)
    rows = ((tensor.n_elements // tensor.shape[-1], tensor) for tensor in held)
    return sum(n_rows * row_bytes(tensor) for n_rows, tensor in rows)


def floats_for_rounded_inputs(cols: int) -> int:
    """Return the floats that a token's rounded inputs take, as cpu/rows.c does."""
    return cols // 2 + 5 * (cols // 32 + 1) + 16
