"""A row's numbers at its own depth and batch: what is timed, computed in a second way.

The gate judges tokens of one sequence against a float64 reference. What a row computes beyond that
is compared here with other kernels of the engine: a prompt's last logits with those of a decoded
token, a decoded token's with those of a prompt, and each sequence of a batch with the same sequence
alone, and with the same batch among copies of itself. One page of a long text that is another's
changes logits by less than two ways of an engine differ: so all memory that a sequence has not
written holds large numbers of either sign (`spoil`): a token that reads one such page among a
thousand gives it all of its attention.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from tinygrad import dtypes
from tinygrad.device import Buffer

from orinbench.measure.backends.backend import RowCheckResult
from orinbench.measure.backends.timed_models import has_recurrent_states
from orinbench.measure.backends.transformer_executor import TransformerExecutor
from orinbench.measure.plan import Case
from orinbench.measure.token_sampling import case_samplings
from orinllm.batching.cache import SequencePages
from orinllm.batching.fused_runner import FusedRunner
from orinllm.batching.runner import Runner, StepRow
from orinllm.choose.sampling import DrawRequest, Sampling, sample_token
from orinllm.gpu.device import fill_compile_cache
from orinllm.gpu.kernels.buffers import pages_for_tokens
from orinllm.gpu.launch import Argument, Launch, LaunchGraph
from orinllm.gpu.memory import ModelMemory
from orinllm.network.vision.pictures import position_shift, split_into_pieces

Ids = Sequence[int]
Floats = NDArray[np.float32]
_GREEDY = Sampling(temperature=0)


def compare_engine_row_two_ways(runner: Runner, case: Case, rows: Sequence[Ids]) -> RowCheckResult:
    """Decode rows of tokens as the case does, behind its prompts; and each in another way.

    A case without generation is its prompt; the other way decodes the last token of it, or for a
    generation reads all of it as a prompt. The first way's sequences lie in every so many pages
    from the last one down, the other's in neighbours, and its prompts are cut elsewhere. Tokens
    that are drawn must be those that the host draws.
    """
    read, ways = case.n_depth + case.n_prompt, case_samplings(case, 0)
    got = _DecodedRows(runner, rows, read, ways)
    if case.n_parallel > 1:
        mixed = got.distance_among_copies()
        alone = [_DecodedRows(runner, [row], len(row) - 1).logits[0] for row in rows]
        found = compare_row_logits(got.logits, alone, "the same sequences alone", rows[0])
        found = replace(found, mixed=mixed)
    elif case.n_gen:
        other = _DecodedRows(runner, rows, len(rows[0]))
        found = compare_row_logits(got.logits, other.logits, "the same tokens as a prompt", rows[0])
    else:
        other = _DecodedRows(runner, rows, max(0, len(rows[0]) - 1 - _LAST))
        found = compare_row_logits(got.logits, other.logits, "decoded tokens", rows[0])
    return replace(found, misdrawn=got.misdrawn, drawn=got.drawn)


# Last tokens of a prompt that are decoded one by one, for the other way; and draws that are seen.
_LAST = 16


class _DecodedRows:
    """Rows whose first `read` tokens are read as a prompt, and the others decoded.

    Of several rows the last token is decoded at least, by a batch. `ways` says how each draws;
    none: the most likely tokens, on neighbouring pages, behind a prompt whose pieces begin half a
    chunk later.
    """

    def __init__(
        self, runner: Runner, rows: Sequence[Ids], read: int, ways: Sequence[Sampling] = ()
    ) -> None:
        self._runner, self._rows, self._read = runner, rows, read
        self._ways = ways or [_GREEDY] * len(rows)
        self.misdrawn = self.drawn = 0
        count, n = pages_for_tokens(runner.context), len(rows)
        # The other paths' slots are neighbours.
        apart = bool(ways) and runner.name == "fused"
        last = n * count - 1
        self._places = [
            SequencePages(range(last - i, -1, -n) if apart else range(i * count, (i + 1) * count))
            for i in range(n)
        ]
        for slot, place in enumerate(self._places):
            place.slot = slot
        overwrite_caches(runner, 1 if ways else 2)
        begins = n == 1 and read >= len(rows[0]) > 1
        read = min(read, len(rows[0]) - 1)
        half = 0 if ways or min(rows[0]) < 0 else min(runner.chunk // 2, read)  # pictures are whole
        cuts = (0, half), (half, read)
        cut = [
            [p for at in cuts for p in split_into_pieces(row, *at, runner.chunk, True)]
            for row in rows
        ]
        for row, pages, parts in zip(rows, self._places, cut, strict=True):
            for at, end in parts[: len(parts) - begins]:
                runner.fill_pages(pages, row, at, end)
        for position in range(read, len(rows[0])):
            self._decode_position(position, cut[0][-1][0] if begins else None)
        self.logits = [np.array(logits) for logits in runner.last_logits()[:n]]

    def distance_among_copies(self) -> float:
        """Return how far logits are apart if all the others are copies of the same sequence.

        Its pages are all that such a batch reads. Recurrent states are in slots of their own, and
        are computed once more.
        """
        worst, rows, places = 0.0, self._rows, self._places
        if has_recurrent_states(self._runner):
            copies = _DecodedRows(self._runner, [rows[0]] * len(rows), self._read).logits
            return compare_row_logits(copies, [self.logits[0]] * len(rows), "", rows[0]).error
        for row, place, logits in zip(rows, places, self.logits, strict=True):
            self._rows, self._places = [row] * len(rows), [place] * len(rows)
            self._decode_position(len(row) - 1)
            found = [*self._runner.last_logits()[: len(rows)]]
            worst = max(worst, compare_row_logits(found, [logits] * len(rows), "", row).error)
        self._rows, self._places = rows, places
        return worst

    def _decode_position(self, position: int, start: int | None = None) -> None:
        """Decode a token of each row, or of one row read a prompt's last piece from `start` on."""
        each = [
            StepRow(
                row[position],
                position,
                pages,
                DrawRequest(how, row[: position + 1]),
                behind=position_shift(row),
            )
            for row, pages, how in zip(self._rows, self._places, self._ways, strict=True)
        ]
        if start is None:
            self._runner.submit_step(each)
        else:
            self._runner.prefill_and_submit_token(each[0], start)
        tokens = [drawn.token for drawn in self._runner.wait_for_tokens()]
        if position < len(self._rows[0]) - _LAST:
            return
        for row, token, logits in zip(each, tokens, self._runner.last_logits(), strict=False):
            self.drawn += 1
            of = row.draw
            self.misdrawn += token != sample_token(logits, of.sampling, of.before, position + 1)


def compare_tinygrad_llm_two_ways(
    network: TransformerExecutor, case: Case, tokens: Ids
) -> RowCheckResult:
    """Compute tinygrad.llm's logits behind the tokens, with a prompt of the case's and without."""
    ways = []
    for read in (case.n_depth + case.n_prompt, len(tokens) - 1):
        read = min(read, len(tokens) - 1)
        if read:
            network.prefill_and_submit_token(tokens[:read], 0)
        for position in range(read, len(tokens)):
            network.submit_step(tokens[position], position)
        ways.append([np.array(network.wait_for_logits())])
    return compare_row_logits(ways[0], ways[1], "the same tokens as a prompt", tokens)


def compare_row_logits(
    got: Sequence[Floats], want: Sequence[Floats], against: str, tokens: Ids
) -> RowCheckResult:
    """Return how far logits are apart: rms of the worst sequence, of the spread.

    `tokens` are those of the first sequence.
    """
    rows = [np.asarray(each, np.float64) for each in (*got, *want)]
    if not all(np.isfinite(row).all() for row in rows):
        return RowCheckResult(False, float("inf"), against)
    pairs = zip(rows[: len(got)], rows[len(got) :], strict=True)
    worst = max(float(np.sqrt(((a - b) ** 2).mean()) / b.std()) for a, b in pairs)
    return RowCheckResult(True, worst, against, list(tokens), rows[0])


def logits_are_finite(rows: Iterable[Floats]) -> bool:
    """Return whether logits are numbers.

    Keys and values that are no numbers make all later logits so, too.
    """
    return all(np.isfinite(row).all() for row in rows)


_THREADS = 256
# Words of two halves, a float or four bytes: a number, and the bits that change its sign.
_HALVES, _FLOAT = (0x54005400, 0x80008000), (0x42800000, 0x80000000)
_BYTES = (0x7F7F7F7F, 0xFEFEFEFE)
_SCALES = (0x38003800, 0)  # halves of one half, of the bytes


def overwrite_caches(runner: Runner, draw: int) -> None:
    """Overwrite what sequences keep on a GPU, by other numbers for each draw.

    Other paths have no pages. Two ways that read one page that nobody wrote must not agree on it.
    """
    if isinstance(runner, FusedRunner):
        memory = runner.executor.memory
        launches = list(_overwriting_launches(memory, draw))
        fill_compile_cache(memory.device, [launch.cuda_source for launch in launches])
        LaunchGraph(memory.device, launches).start()
        runner.executor.wait_for_device()


def _overwriting_launches(memory: ModelMemory, draw: int) -> Iterator[Launch]:
    kept = _BYTES if memory.scales else _HALVES
    yield from (_overwriting_launch(buffer, draw, *kept) for buffer in memory.caches)
    yield from (_overwriting_launch(buffer, draw, *_SCALES) for buffer in memory.scales)
    if memory.states is not None:
        yield _overwriting_launch(memory.states, draw, *_FLOAT)


def _overwriting_launch(buffer: Buffer, draw: int, word: int, signs: int) -> Launch:
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
