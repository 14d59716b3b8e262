"""One token of each of many sequences on tensor cores: cuda/batch.cu, and cuda/argmax.cu."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tinygrad.device import Buffer

from orinllm.gpu.device import gemv_blocks_per_sm, multiprocessor_count
from orinllm.gpu.kernels.gemm import RowProduct, SameTypeMatrices, group_matrices_by_type
from orinllm.gpu.launch import Constants, Launch, make_launch

# Columns that a warp takes at once, so that columns / 128 warps at most have some.
_STEP = 128
# Warps of a block: the more where every block has one item alone.
_ALONE_WARPS, _WARPS = 16, 8
# Of the choice of the most likely token.
_ARGMAX_BLOCKS, _ARGMAX_THREADS = 8, 256


def batch_product_launches(device: str, product: RowProduct) -> Iterator[Launch]:
    """Yield the launches of a batch's product, one for neighbours of one type."""
    for group in group_matrices_by_type(product):
        yield _batch_product_launch(device, group)


def _batch_product_launch(device: str, group: SameTypeMatrices) -> Launch:
    product, (rows, cols) = group.product, group.shape
    type_, sequences = group.members[0][0].type, product.count
    parts, items = group.part_initialisers_and_blocks(group.rows_per_warp)
    sms = multiprocessor_count(device)
    most = _ALONE_WARPS if items <= sms else _WARPS
    # A power of two: threads are whole rows of an item.
    warps = 1 << (min(most, max(1, cols // _STEP)).bit_length() - 1)
    per_sm = max(1, _ALONE_WARPS // max(warps, _WARPS))
    grid = min(items, sms * min(per_sm, gemv_blocks_per_sm(device)))
    assert isinstance(sequences, int)
    return Launch(
        name=f"batch_{product.role}_{type_.name.lower()}_{rows}x{cols}_{sequences}",
        file="batch.cu",
        constants=(
            Constants(
                type=type_.name,
                cols=cols,
                out_stride=product.out_stride,
                mode=product.mode,
                activation=product.activation,
                warps=warps,
                parts=len(parts),
                sequences=sequences,
                items=items,
                grid=grid,
            ),
        ),
        arguments=group.arguments,
        body=group.kernel_body("batch<P0>(Batch", parts),
        grid=(grid, 1, 1),
        block=warps * 32,
        writes=("out",),
        operations=2 * sequences * rows * cols,
        n_bytes=group.n_bytes,
        per_sm=per_sm,
    )


@dataclass(frozen=True)
class ArgmaxScratch:
    """Scratch of the most likely tokens of so many sequences."""

    part_v: Buffer  # floats
    part_i: Buffer  # int32
    counters: Buffer  # int32, one a sequence, zero between launches

    @staticmethod
    def buffer_sizes(sequences: int) -> tuple[int, int]:
        """Return the elements of each part, and of the counters."""
        return sequences * _ARGMAX_BLOCKS, sequences


def argmax_launch(
    logits: Buffer, scratch: ArgmaxScratch, state: Buffer, mail: Buffer, softcap: float = 0.0
) -> Launch:
    """Return the choice of each sequence's token, which moves its position on in `state`.

    Logits are soft-capped behind it where `softcap` is not 0.
    """
    sequences = mail.size // 2
    rows = logits.size // sequences
    launch = make_launch(
        "argmax.cu argmax",
        f"{rows}_{sequences}",
        Constants(rows=rows, blocks=_ARGMAX_BLOCKS, threads=_ARGMAX_THREADS, softcap=softcap),
        {
            "float* logits" if softcap else "const float* logits": logits,
            "float* part_v": scratch.part_v,
            "int* part_i": scratch.part_i,
            "int* state": state,
            "int* counters": scratch.counters,
            "int* mail": mail,
        },
        f"Argmax{{logits, part_v, part_i, state, state + {sequences}, counters, mail}}",
        (_ARGMAX_BLOCKS, sequences),
    )
    written = ("logits",) if softcap else ()
    writes = (*written, "part_v", "part_i", "state", "counters", "mail")
    return replace(launch, block=_ARGMAX_THREADS, writes=writes)
