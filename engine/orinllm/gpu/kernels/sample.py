"""Drawing the next token of each sequence: cuda/sample.cu."""

from collections.abc import Iterator
from dataclasses import dataclass

from tinygrad import dtypes
from tinygrad.device import Buffer
from tinygrad.dtype import DType

from orinllm.gpu.device import multiprocessors
from orinllm.gpu.kernels.buffers import ceil_div
from orinllm.gpu.launch import Argument, Constants, Launch

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
class SampleConstants(Constants):
    """P of sample_count() and sample_pick()."""

    sequences: int
    vocabulary: int
    context: int
    blocks: int
    threads: int
    list: int


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
    def make(
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
            zeros(n * mask_words(vocabulary), dtypes.uint32),
            zeros(n * _ROW_WORDS),
            zeros(n * _BINS),
            Buffer(logits.device, n * _LIST, dtypes.uint64).allocate(),
            mail,
        )


def mask_words(vocabulary: int) -> int:
    """Return the words of a slot's mask: whether there is one, then a bit for each token."""
    return 1 + ceil_div(vocabulary, 32)


def sample_constants(device: str, vocabulary: int, context: int, sequences: int) -> SampleConstants:
    """Return how rows are spread: a block for 2048 logits, two on a multiprocessor at most."""
    most = max(1, 2 * multiprocessors(device) // sequences)
    blocks = min(most, ceil_div(vocabulary, _THREADS * _EACH))
    return SampleConstants(sequences, vocabulary, context, blocks, _THREADS, _LIST)


def sample_tokens(constants: SampleConstants, buffers: SampleBuffers) -> Iterator[Launch]:
    """Yield the launches that replace the head's tokens of slots that draw theirs."""
    arguments: tuple[Argument, ...] = (
        Argument("const float* logits", buffers.logits),
        Argument("int* state", buffers.state),
        Argument("Slot* slots", buffers.slots),
        Argument("const float* bias", buffers.bias),
        Argument("int* counts", buffers.counts),
        Argument("int* history", buffers.history),
        Argument("u32* mask", buffers.mask),
        Argument("Row* rows", buffers.rows),
        Argument("int* bins", buffers.bins),
        Argument("u64* list", buffers.list),
    )
    names = ", ".join(argument.name for argument in arguments)
    mail = () if buffers.mail is None else (Argument("int* mail", buffers.mail),)
    names += ", mail" if mail else ", 0"
    arguments += mail
    c = constants
    picks = ("state", "counts", "history", "mask", "rows", "bins", "list")
    both = (
        ("sample_count", c.blocks + 1, ("rows", "bins")),
        ("sample_pick", c.blocks, (*picks, *(argument.name for argument in mail))),
    )
    for kernel, blocks, writes in both:
        yield Launch(
            name=f"{kernel}_{c.sequences}x{c.vocabulary}",
            file="sample.cu",
            constants=(c,),
            arguments=arguments,
            body=f"  {kernel}<P0>(Sample<P0>{{{names}}});",
            grid=(blocks, c.sequences, 1),
            block=c.threads,
            writes=writes,
            operations=c.vocabulary * c.sequences,
        )
