"""Drawing the next token of each sequence: cuda/sample.cu."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tinygrad import dtypes
from tinygrad.device import Buffer
from tinygrad.dtype import DType

from orinllm.gpu.device import multiprocessor_count
from orinllm.gpu.kernels.buffers import ceil_div
from orinllm.gpu.launch import Constants, Given, Launch, make_launch

# Of cuda/sample.cu: bins of a row, 4-byte words of a Slot and of a Row.
_BINS, _SLOT_WORDS, _ROW_WORDS = 1024, 16, 8
# Candidates that are collected; more are searched where they are, by one block.
_LIST = 2048
_THREADS = 512
# Logits of a thread that are on their way at once.
_EACH = 4
#: Tokens at most: a candidate has 22 bits for them.
MOST_TOKENS = 1 << 22


@dataclass(frozen=True)
class SampleBuffers:
    """Buffers that the kernels read and write, a row for each of N slots (cuda/sample.cu)."""

    logits: Buffer
    state: Buffer
    slots: Buffer
    bias: Buffer
    counts: Buffer
    history: Buffer
    mask: Buffer
    rows: Buffer
    bins: Buffer
    list: Buffer
    mail: Buffer | None = None

    @staticmethod
    def allocate(
        logits: Buffer, state: Buffer, sequences: int, context: int, mail: Buffer | None = None
    ) -> "SampleBuffers":
        """Allocate what goes with logits (sequences, vocabulary); what must be zero is."""
        n, vocabulary = sequences, logits.size // sequences

        def zeros(size: int, dtype: DType = dtypes.int32) -> Buffer:
            buffer = Buffer(logits.device, size, dtype).allocate()
            buffer.copyin(memoryview(bytearray(buffer.nbytes)))
            return buffer

        return SampleBuffers(
            logits,
            state,
            zeros(n * _SLOT_WORDS),
            zeros(n * vocabulary, dtypes.float32),
            zeros(n * vocabulary),
            zeros(n * context),
            zeros(n * mask_word_count(vocabulary), dtypes.uint32),
            zeros(n * _ROW_WORDS),
            zeros(n * _BINS),
            Buffer(logits.device, n * _LIST, dtypes.uint64).allocate(),
            mail,
        )


def mask_word_count(vocabulary: int) -> int:
    """Return the words of a slot's mask: whether there is one, then a bit for each token."""
    return 1 + ceil_div(vocabulary, 32)


def sampling_launches(buffers: SampleBuffers, threads: int = _THREADS) -> Iterator[Launch]:
    """Yield the launches that replace the head's tokens of slots that draw theirs.

    Rows are spread over a block for 2048 logits, two on a multiprocessor at most.
    """
    sequences = buffers.rows.size // _ROW_WORDS
    vocabulary, context = (b.size // sequences for b in (buffers.logits, buffers.history))
    most = max(1, 2 * multiprocessor_count(buffers.logits.device) // sequences)
    spread = min(most, ceil_div(vocabulary, _THREADS * _EACH))
    given: Given = {
        "const float* logits": buffers.logits,
        "int* state": buffers.state,
        "Slot* slots": buffers.slots,
        "const float* bias": buffers.bias,
        "int* counts": buffers.counts,
        "int* history": buffers.history,
        "u32* mask": buffers.mask,
        "Row* rows": buffers.rows,
        "int* bins": buffers.bins,
        "u64* list": buffers.list,
        "int* mail": buffers.mail,
    }
    constants = Constants(
        sequences=sequences,
        vocabulary=vocabulary,
        context=context,
        blocks=spread,
        threads=threads,
        list=_LIST,
    )
    mail = () if buffers.mail is None else ("mail",)
    picks = ("state", "counts", "history", "mask", "rows", "bins", "list", *mail)
    for kernel, blocks, writes in (
        ("sample_count", spread + 1, ("rows", "bins")),
        ("sample_pick", spread, picks),
    ):
        names = ", ".join(at.split()[-1] for at in given)
        call, label = f"Sample<P0>{{{names}}}", f"{sequences}x{vocabulary}"
        grid = blocks, sequences
        launch = make_launch(f"sample.cu {kernel}", label, constants, given, call, grid)
        yield replace(launch, block=threads, writes=writes, operations=vocabulary * sequences)
