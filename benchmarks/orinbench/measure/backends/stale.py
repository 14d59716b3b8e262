"""Memory that nobody has written, made to show wherever it is read.

Keys, values and recurrent states on a GPU become large numbers of either sign. A token that reads
one such page among a thousand gives it all of its attention.
"""

from collections.abc import Iterator

from tinygrad import dtypes
from tinygrad.device import Buffer

from orinllm.batching.fused_runner import FusedRunner
from orinllm.batching.runner import Runner
from orinllm.gpu.device import compile_all
from orinllm.gpu.launch import Argument, Graph, Launch
from orinllm.gpu.memory import Memory

_THREADS = 256
# Words of two halves, a float or four bytes: a number, and the bits that change its sign.
_HALVES, _FLOAT = (0x54005400, 0x80008000), (0x42800000, 0x80000000)
_BYTES = (0x7F7F7F7F, 0xFEFEFEFE)
_SCALES = (0x38003800, 0)  # halves of one half, of the bytes


def spoil(runner: Runner, draw: int) -> None:
    """Overwrite what sequences keep on a GPU, by other numbers for each draw.

    Other paths have no pages. Two ways that read one page that nobody wrote must not agree on it.
    """
    if isinstance(runner, FusedRunner):
        memory = runner.executor.memory
        launches = list(_launches(memory, draw))
        compile_all(memory.device, [launch.source for launch in launches])
        Graph(memory.device, launches).run()
        runner.executor.settle()


def _launches(memory: Memory, draw: int) -> Iterator[Launch]:
    kept = _BYTES if memory.scales else _HALVES
    yield from (_overwrite(buffer, draw, *kept) for buffer in memory.caches)
    yield from (_overwrite(buffer, draw, *_SCALES) for buffer in memory.scales)
    if memory.states is not None:
        yield _overwrite(memory.states, draw, *_FLOAT)


def _overwrite(buffer: Buffer, draw: int, word: int, signs: int) -> Launch:
    words = buffer.nbytes // 4
    view = buffer.view(words, dtypes.uint32, 0).ensure_allocated()
    return Launch(
        name=f"spoil_{words}_{word:x}_{draw}",
        file="gpu.cuh",
        constants=(),
        arguments=(Argument("unsigned* to", view),),
        body=f"""\
  const unsigned at = blockIdx.x * {_THREADS}u + threadIdx.x;
  unsigned mixed = (at + {draw}u) * 2654435761u;
  mixed = (mixed ^ mixed >> 15) * 2246822519u;
  mixed ^= mixed >> 13;
  unsigned flips = 0u;  // of each byte all bits or none
  for (int byte = 0; byte < 4; byte++)
    if (mixed >> byte & 1u) flips |= 255u << 8 * byte;
  if (at < {words}u) to[at] = {word:#x}u ^ (flips & {signs:#x}u);""",
        grid=(-(-words // _THREADS), 1, 1),
        block=_THREADS,
        writes=("to",),
    )
