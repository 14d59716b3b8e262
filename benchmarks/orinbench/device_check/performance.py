"""The worth of the driver's choices on this board: each against its alternative, in turns.

A question is a program of `performance_probe.py` with two choices; it runs with the driver's own,
the other, the other, the own, so that a drift of the board does not look like a choice. A side is
better where all runs of it are better than all of the other, else they are the same. What was not
asked to the end, or failed, has a verdict that says so and no `better`.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orinbench.child import run
from orinbench.device_check.switches import ratios

PROBE = (sys.executable, "-m", "orinbench.device_check.performance_probe")
_RUN_SECONDS = 90.0

Found = dict[str, Any]


@dataclass(frozen=True)
class Choice:
    """One side: its name, the environment that makes it so, and what the probe has to change."""

    name: str
    variables: Mapping[str, str] = field(default_factory=dict)
    change: str = "-"


@dataclass(frozen=True)
class Question:
    """A probe with the driver's choice and another; `figure` decides, `larger` says which way."""

    name: str
    probe: str
    own: Choice
    other: Choice
    figure: str
    larger: bool
    model: bool = False


QUESTIONS = (
    Question(
        "l2",
        "l2",
        Choice("cacheable"),
        Choice("volatile", {"TEGRA_L2": "0"}),
        "read_gb_s",
        True,
    ),
    Question(
        "shared_memory",
        "shared_memory",
        Choice("for the blocks of an SM"),
        Choice("for one block", {"NV_SMEM_TARGET": "0"}),
        "launch_us",
        False,
    ),
    Question(
        "preemption",
        "preemption",
        Choice("CILP"),
        Choice("wait for idle", change="wait_for_idle"),
        "worst_us",
        False,
    ),
    Question(
        "rings",
        "rings",
        Choice("cached"),
        Choice("write-combined", change="write_combined"),
        "submit_us",
        False,
    ),
    Question(
        "copies",
        "copies",
        Choice("by the CPU"),
        Choice("by a kernel", change="copy_by_a_kernel"),
        "copy_gb_s",
        True,
    ),
    Question(
        "decode",
        "decode",
        Choice("cacheable"),
        Choice("volatile", {"TEGRA_L2": "0"}),
        "token_us",
        False,
        True,
    ),
)

Runner = Callable[[str, Choice, bool, float], Found]


def ask(run_probe: Runner, until: float, keep: Callable[[dict[str, Found]], None]) -> Found:
    """Answer every question until done or `until` of time.monotonic(); `keep` gets each answer."""
    found: Found = {}
    for question in QUESTIONS:
        entry: Found = {"own": question.own.name, "other": question.other.name}
        entry |= {"figure": question.figure, "with_own": [], "with_other": [], "ratio": {}}
        entry["verdict"] = "not done"
        found[question.name] = entry
        for side, choice in (
            ("with_own", question.own),
            ("with_other", question.other),
            ("with_other", question.other),
            ("with_own", question.own),
        ):
            left = min(until - time.monotonic(), _RUN_SECONDS)
            if left <= 0:
                return found
            entry[side].append(run_probe(question.probe, choice, question.model, left))
        entry["ratio"] = ratios(entry["with_own"], entry["with_other"])
        failed = [
            run["error"] for run in (*entry["with_own"], *entry["with_other"]) if "error" in run
        ]
        if failed:
            entry["verdict"] = f"no answer: {failed[0]}"
        else:
            entry["better"] = better(question, entry["with_own"], entry["with_other"])
            entry["verdict"] = in_words(question, entry["better"])
        keep(found)
    return found


def better(question: Question, own: Sequence[Found], other: Sequence[Found]) -> str:
    """Return which side is better by the question's figure: own, other or same."""
    mine, others = ([float(e[question.figure]) for e in side] for side in (own, other))
    if not question.larger:
        mine, others = [-v for v in mine], [-v for v in others]
    if min(mine) > max(others):
        return "own"
    return "other" if max(mine) < min(others) else "same"


def in_words(question: Question, side: str) -> str:
    """Return the answer in one line."""
    return {
        "own": f"{question.own.name} is better, as the driver has it",
        "other": f"{question.other.name} is better than what the driver has",
        "same": "the same within what the runs differ by",
    }[side]


def probe_runner(environment: Mapping[str, str], sizes: str, model: Callable[[], Path]) -> Runner:
    """Return what runs a probe; `model` is asked for a GGUF where a question wants one."""

    def run_probe(probe: str, choice: Choice, with_model: bool, seconds: float) -> Found:
        with tempfile.TemporaryDirectory() as scratch:
            out = Path(scratch, "found.json")
            arguments = [out, probe, choice.change, sizes, *([model()] if with_model else [])]
            ended = run([*PROBE, *arguments], seconds, {**environment, **choice.variables})
            if out.exists():
                found: Found = json.loads(out.read_text())
                return found
            if ended.status is None:
                return {"error": f"not done in {seconds:.0f} s"}
            return {"error": ended.reason}

    return run_probe
