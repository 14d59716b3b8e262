"""The worth of the driver's choices on this board: each against its alternative, in turns.

A side is better where all runs of it are better than all of the other, else they are the same. What
failed has a verdict that says so and no `better`.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from orinbench.device_check.check import Ask
from orinbench.device_check.gpu import Found

_RUN_SECONDS = 90.0
_VOLATILE = {"TEGRA_L2": "0"}


@dataclass(frozen=True)
class Choice:
    """One side: its name, and the program that has it."""

    name: str
    ask: Ask


@dataclass(frozen=True)
class Question:
    """The driver's choice and another; `figure` decides, `larger` says which way."""

    name: str
    own: Choice
    other: Choice
    figure: str
    larger: bool


@dataclass(frozen=True)
class Answer:
    """An answer in a report, as people are told of it; `ratio` is own over other by figure."""

    own: str
    other: str
    figure: str
    ratio: dict[str, float]
    verdict: str


QUESTIONS = (
    Question(
        "l2",
        Choice("cacheable", Ask("l2")),
        Choice("volatile", Ask("l2", _VOLATILE)),
        "read_gb_s",
        larger=True,
    ),
    Question(
        "shared_memory",
        Choice("for the blocks of an SM", Ask("shared_memory")),
        Choice("for one block", Ask("shared_memory", {"NV_SMEM_TARGET": "0"})),
        "launch_us",
        larger=False,
    ),
    Question(
        "preemption",
        Choice("CILP", Ask("preemption")),
        Choice("wait for idle", Ask("preemption", choice="wait_for_idle")),
        "worst_us",
        larger=False,
    ),
    Question(
        "rings",
        Choice("cached", Ask("rings")),
        Choice("write-combined", Ask("rings", choice="write_combined")),
        "submit_us",
        larger=False,
    ),
    Question(
        "copies",
        Choice("by the CPU", Ask("copy_ways")),
        Choice("by a kernel", Ask("copy_ways", choice="copy_by_a_kernel")),
        "copy_gb_s",
        larger=True,
    ),
    Question(
        "decode",
        Choice("cacheable", Ask("decode", model=True)),
        Choice("volatile", Ask("decode", _VOLATILE, model=True)),
        "token_us",
        larger=False,
    ),
)


def answers(ask: Callable[[Ask, float], Found], until: float) -> Iterator[tuple[str, Found]]:
    """Yield each question's name and answer; raises TimeoutError at `until` of time.monotonic().

    The sides run as own, other, other, own, so that a drift does not look like a difference.
    """
    for question in QUESTIONS:
        runs: list[Found] = []
        for side in (question.own, question.other, question.other, question.own):
            if (left := until - time.monotonic()) <= 0:
                raise TimeoutError
            runs.append(ask(side.ask, min(left, _RUN_SECONDS)))
        yield question.name, _answer(question, [runs[0], runs[3]], runs[1:3])


def _answer(question: Question, own: Sequence[Found], other: Sequence[Found]) -> Found:
    """Return what a report has; `ratio` is the medians' of each figure, own over other."""
    entry: Found = {"own": question.own.name, "other": question.other.name}
    entry |= {"figure": question.figure, "with_own": own, "with_other": other, "ratio": {}}
    failed = [run["error"] for run in (*own, *other) if "error" in run]
    if failed:
        return entry | {"verdict": f"no answer: {failed[0]}"}
    for name in own[0]:
        if all(isinstance(run[name], float) and run[name] > 0 for run in (*own, *other)):
            ours, theirs = (median(run[name] for run in side) for side in (own, other))
            entry["ratio"][name] = round(ours / theirs, 4)
    sign = 1 if question.larger else -1
    mine, others = ([sign * float(run[question.figure]) for run in side] for side in (own, other))
    if min(mine) > max(others):
        said = {"better": "own", "verdict": f"{question.own.name} is better, as the driver has it"}
    elif max(mine) < min(others):
        verdict = f"{question.other.name} is better than what the driver has"
        said = {"better": "other", "verdict": verdict}
    else:
        said = {"better": "same", "verdict": "the same within what the runs differ by"}
    return entry | said
