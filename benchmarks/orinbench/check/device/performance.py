"""The worth of the driver's choices on this board: each against its alternative, in turns.

A side is better where all runs of it are better than all of the other, else they are the same. What
failed has a verdict that says so and no `better`.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from orinbench.check.device.check import Ask
from orinbench.check.device.gpu import Found

_RUN_SECONDS = 90.0
_CACHEABLE = {"TEGRA_L2": "2"}


@dataclass(frozen=True)
class Question:
    """The driver's choice and another, of one program, which has the question's name.

    The other has these variables and this choice. `figure` decides: speeds by being larger, times
    by being smaller.
    """

    name: str
    figure: str
    own: str
    other: str
    variables: Mapping[str, str] = field(default_factory=dict)
    choice: str = "-"


QUESTIONS = (
    Question("l2", "read_gb_s", "volatile", "cacheable", _CACHEABLE),
    Question(
        "shared_memory",
        "launch_us",
        "for the blocks of an SM",
        "for one block",
        {"NV_SMEM_TARGET": "0"},
    ),
    Question("preemption", "worst_us", "CILP", "wait for idle", choice="wait_for_idle"),
    Question("rings", "submit_us", "cached", "write-combined", choice="write_combined"),
    Question("copies", "copy_gb_s", "by the CPU", "by a kernel", choice="copy_by_a_kernel"),
    Question("decode", "token_us", "volatile", "cacheable", _CACHEABLE),
)


@dataclass(frozen=True)
class Answer:
    """An answer in a report, as people are told of it; `ratio` is own over other by figure."""

    own: str
    other: str
    figure: str
    ratio: dict[str, float]
    verdict: str


def answers(ask: Callable[[Ask, float], Found], until: float) -> Iterator[tuple[str, Found]]:
    """Yield each question's name and answer; raises TimeoutError at `until` of time.monotonic().

    The sides run as own, other, other, own, so that a drift does not look like a difference.
    """
    for question in QUESTIONS:
        own, other = Ask(question.name), Ask(question.name, question.variables, question.choice)
        runs: list[Found] = []
        for side in (own, other, other, own):
            if (left := until - time.monotonic()) <= 0:
                raise TimeoutError
            runs.append(ask(side, min(left, _RUN_SECONDS)))
        yield question.name, _answer(question, [runs[0], runs[3]], runs[1:3])


def _answer(question: Question, own: Sequence[Found], other: Sequence[Found]) -> Found:
    """Return what a report has; `ratio` is the medians' of each figure, own over other."""
    entry: Found = {"own": question.own, "other": question.other}
    entry |= {"figure": question.figure, "with_own": own, "with_other": other, "ratio": {}}
    failed = [run["error"] for run in (*own, *other) if "error" in run]
    if failed:
        return entry | {"verdict": f"no answer: {failed[0]}"}
    for name in own[0]:
        if all(isinstance(run[name], float) and run[name] > 0 for run in (*own, *other)):
            ours, theirs = (median(run[name] for run in side) for side in (own, other))
            entry["ratio"][name] = round(ours / theirs, 4)
    sign = 1 if question.figure.endswith("_gb_s") else -1
    mine, others = ([sign * float(run[question.figure]) for run in side] for side in (own, other))
    if min(mine) > max(others):
        said = {"better": "own", "verdict": f"{question.own} is better, as the driver has it"}
    elif max(mine) < min(others):
        verdict = f"{question.other} is better than what the driver has"
        said = {"better": "other", "verdict": verdict}
    else:
        said = {"better": "same", "verdict": "the same within what the runs differ by"}
    return entry | said
