"""A row's numbers at its own depth and batch: what is timed, computed in a second way.

The gate judges 24 tokens of one sequence against a float64 reference. What a row computes beyond
that is compared here with other kernels of the engine: a prompt's last logits with those of a
decoded token, a decoded token's with those of a prompt, and each sequence of a batch with the same
sequence alone.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from orinbench.measure.backends.backend import RowChecked
from orinbench.measure.backends.transformer import TransformerExecutor
from orinbench.measure.plan import Case
from orinllm.batching.cache import Place
from orinllm.batching.runner import Draw, Row, Runner
from orinllm.choose.sampling import Sampling
from orinllm.gpu.memory import pages_of

Ids = Sequence[int]
Floats = NDArray[np.float32]
_GREEDY = Sampling(temperature=0)


def check_engine_row(runner: Runner, case: Case, rows: Sequence[Ids]) -> RowChecked:
    """Decode rows of tokens as the case does, behind its prompts; and each in another way.

    A case without generation is its prompt; the other way decodes the last token of it, or for a
    generation reads all of it as a prompt.
    """
    got = decoded(runner, rows, case.n_depth + case.n_prompt)
    if case.n_parallel > 1:
        alone = [decoded(runner, [row], len(row) - 1)[0] for row in rows]
        return compared(got, alone, "the same sequences alone", rows[0])
    if case.n_gen:
        other = decoded(runner, rows, len(rows[0]) - 1)
        return compared(got, other, "the same tokens as a prompt", rows[0])
    other = decoded(runner, rows, max(0, len(rows[0]) - 1 - min(len(rows[0]) - 1, _DECODED)))
    return compared(got, other, "decoded tokens", rows[0])


# Last tokens of a prompt that are decoded one by one, for the other way.
_DECODED = 16


def decoded(runner: Runner, rows: Sequence[Ids], read: int) -> list[Floats]:
    """Return the logits behind each row, whose first `read` tokens are read as a prompt.

    The last token of all is decoded, by a batch where there are several rows.
    """
    count = pages_of(runner.context)
    places = [Place(range(i * count, (i + 1) * count)) for i in range(len(rows))]
    for slot, place in enumerate(places):
        place.slot = slot
    read = min(read, len(rows[0]) - 1)
    for row, pages in zip(rows, places, strict=True):
        for at in range(0, read, runner.chunk):
            runner.fill(pages, row, at, min(at + runner.chunk, read))
    for position in range(read, len(rows[0])):
        runner.launch(
            [
                Row(row[position], position, pages, Draw(_GREEDY, row[: position + 1]))
                for row, pages in zip(rows, places, strict=True)
            ]
        )
        runner.collect()
    return [np.array(logits) for logits in runner.logits()[: len(rows)]]


def check_network_row(network: TransformerExecutor, case: Case, tokens: Ids) -> RowChecked:
    """Compute tinygrad.llm's logits behind the tokens, with a prompt of the case's and without."""
    ways = []
    for read in (case.n_depth + case.n_prompt, len(tokens) - 1):
        read = min(read, len(tokens) - 1)
        if read:
            network.begin(tokens[:read], 0)
        for position in range(read, len(tokens)):
            network.step(tokens[position], position)
        ways.append([np.array(network.logits())])
    return compared(ways[0], ways[1], "the same tokens as a prompt", tokens)


def compared(
    got: Sequence[Floats], want: Sequence[Floats], against: str, tokens: Ids
) -> RowChecked:
    """Return how far logits are apart: rms of the worst sequence, of the spread.

    `tokens` are those of the first sequence.
    """
    rows = [np.asarray(each, np.float64) for each in (*got, *want)]
    if not all(np.isfinite(row).all() for row in rows):
        return RowChecked(False, float("inf"), against)
    pairs = zip(rows[: len(got)], rows[len(got) :], strict=True)
    worst = max(float(np.sqrt(((a - b) ** 2).mean()) / b.std()) for a, b in pairs)
    return RowChecked(True, worst, against, list(tokens), rows[0])


def are_finite(rows: Iterable[Floats]) -> bool:
    """Return whether logits are numbers.

    Keys and values that are no numbers make all later logits so, too.
    """
    return all(np.isfinite(row).all() for row in rows)
