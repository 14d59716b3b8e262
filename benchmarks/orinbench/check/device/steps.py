"""The steps of a device check, in their order, each with its time.

A step returns its result, raises `StepNotPossible` with the reason, or `StepOutOfTime` with what it
has. None needs a person or changes the board; what may crash the GPU runs in a process of its own.
"""

import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from orinbench.check.device.probes import Found
from orinbench.child import CommandResult, run_command
from orinbench.measure.backends.llama_cpp import find_llama_bench
from orinbench.measure.board import read_board_state
from orinbench.measure.environment import read_environment

CTRL = "/dev/nvgpu/igpu0/ctrl"
PROBES = ("-m", "orinbench.check.device.probes")
# tinygrad's wait for the GPU: longer than any kernel here takes, on an interpreted GPU too; and
# shorter than its default, for a kernel that hangs on purpose.
_WAIT = "HCQDEV_WAIT_TIMEOUT_MS"
_WAIT_MS = {"board": "10000", "tiny": "300000"}
_HANG_MS = "2000"
# Ways to share a buffer: the driver's TEGRA_L2, and what the program does before the CPU's turn.
COHERENCE = (("volatile", "0", "-"), ("flushed", "2", "-"), ("unflushed", "2", "no_flush"))
# The driver's own policy of the L2, and the other that a token and a prompt are timed with.
L2_POLICIES = "TEGRA_L2=1,2"
# nvgpusim replay's sum: "105 events of a board trace replayed on r36, 0 skipped, 0 differences".
_REPLAYED = re.compile(r"(\d+) events of a \w+ trace replayed on .*?(\d+) differences")
_KMSG = "/dev/kmsg"
# nvgpu's own lines and those of the memory controller and the SMMU behind it.
_OURS = re.compile(r"nvgpu|gk20a|ga10b|nvmap|tegra-mc|mc-err|arm-smmu|gpu@|17000000\.gpu", re.I)
# A process is called by its user's choice; its number says nothing.
_NAMES = re.compile(r"\b(comm|name|process|pid|task)([ :=]+)\S+", re.I)
_MOST_LINES = 2000


class StepNotPossible(Exception):  # noqa: N818
    """The step cannot be taken here; the message says why and what would help."""


class StepOutOfTime(Exception):  # noqa: N818
    """The step's time ran out; `result` is what it has, None if that is nothing."""

    def __init__(self, seconds: float, result: Any = None) -> None:
        super().__init__(f"not done in {seconds:.0f} s")
        self.result = result


@dataclass(frozen=True)
class ProbeRequest:
    """A program of `probes.py`: its name, the environment and the choice that it runs with."""

    name: str
    variables: Mapping[str, str] = field(default_factory=dict)
    choice: str = "-"


@dataclass(frozen=True)
class DeviceCheck:
    """State shared by the steps; `begun_us` is its start, in microseconds of CLOCK_MONOTONIC."""

    folder: Path
    simulated: bool
    begun_us: int
    model: Path | None = None

    @property
    def work_size(self) -> str:
        """Amounts of work: "board", or "tiny" for a simulated GPU."""
        return "tiny" if self.simulated else "board"

    @property
    def trace_path(self) -> Path:
        """The recorded calls: beside the report."""
        return self.folder / "trace.jsonl"

    @property
    def tinygrad_environment(self) -> dict[str, str]:
        """Environment for tinygrad: its own driver, and a bounded wait."""
        return {"DEV": "TEGRA+NV", _WAIT: _WAIT_MS[self.work_size]}

    def run_probe(
        self, ask: ProbeRequest, seconds: float, recorder: Sequence[object] = ()
    ) -> Found:
        """Return what a program found; raises StepOutOfTime, and RuntimeError with its error.

        `recorder` is a Python program with its arguments, in which it runs.
        """
        with tempfile.TemporaryDirectory() as scratch:
            out = Path(scratch, "found.json")
            words = (*PROBES, out, ask.name, self.work_size, ask.choice)
            variables = {**self.tinygrad_environment, **ask.variables}
            ended = run_command([sys.executable, *recorder, *words], max(seconds, 1), variables)
            found: Found = {"failed": ended.last_error_line}
            if out.exists():
                found = json.loads(out.read_text())
            elif ended.status is None:
                raise StepOutOfTime(seconds)
        if "failed" in found:
            raise RuntimeError(found["failed"])
        return found

    def try_probe(self, ask: ProbeRequest, seconds: float) -> Found:
        """Return what a program found; an end without a result is its `error`."""
        try:
            return self.run_probe(ask, seconds)
        except (StepOutOfTime, RuntimeError) as error:
            return {"error": str(error)}


def record_machine(check: DeviceCheck, seconds: float) -> dict[str, Any]:
    """The machine and its state."""
    return {"environment": asdict(read_environment()), "state": read_board_state().json_record()}


def run_abi_probe(check: DeviceCheck, seconds: float) -> Any:
    """Record the drivers' answers to a client that shares nothing with tinygrad."""
    ended = run_command([sys.executable, "-m", "orinbench.check.device.abi_probe"], seconds)
    _require_success(ended, seconds)
    return json.loads(ended.out)


def record_smoke_trace(check: DeviceCheck, seconds: float) -> Any:
    """tinygrad computes, with every call of it recorded into trace.jsonl."""
    with tempfile.TemporaryDirectory() as scratch:
        recorder = Path(scratch, "recorder.pyz")
        _require_success(
            run_command([sys.executable, "-m", "nvgpusim", "recorder", recorder], seconds), seconds
        )
        return check.run_probe(
            ProbeRequest("smoke"), seconds, (recorder, "-o", check.trace_path, "--")
        )


def replay_trace_on_model(check: DeviceCheck, seconds: float) -> dict[str, Any]:
    """Replay the recorded calls and compare the model's answers with the board's."""
    if not check.trace_path.exists():
        raise StepNotPossible("there is no trace: the step smoke made none")
    said = []
    for flags in ([], ["--addresses"]):
        command = [sys.executable, "-m", "nvgpusim", "replay", *flags, check.trace_path]
        ended = run_command(command, seconds)
        if ended.status != 1:  # 1: there are differences
            _require_success(ended, seconds)
        said.append(f"{ended.out}\n{ended.err}")
    plain, with_addresses = (_REPLAYED.search(text) for text in said)
    if plain is None or with_addresses is None:
        raise RuntimeError("nvgpusim replay printed no summary")
    return {
        "events": int(plain[1]),
        "differences": int(plain[2]),
        "address_differences": int(with_addresses[2]),
        "said": [line for line in said[0].splitlines() if line.strip()][:50],
    }


def measure_queue(check: DeviceCheck, seconds: float) -> dict[str, Any]:
    """Measure the cost of a full ring and record what the GPU writes into a QMD."""
    return check.run_probe(ProbeRequest("queue"), seconds)


def measure_coherence(check: DeviceCheck, seconds: float) -> dict[str, Any]:
    """Count what CPU and GPU miss of each other's stores: without the L2, flushed, not flushed."""
    until, found = time.monotonic() + seconds, {}
    for name, policy, choice in COHERENCE:
        ask = ProbeRequest("coherence", {"TEGRA_L2": policy}, choice)
        found[name] = check.run_probe(ask, until - time.monotonic())
    return found


def find_memory_limit(check: DeviceCheck, seconds: float) -> dict[str, Any]:
    """Find where memory ends: with an error of the driver, 1 GiB before the board has none."""
    return check.run_probe(ProbeRequest("memory", {"TEGRA_RESERVE_MB": "1024"}), seconds)


def provoke_faults(check: DeviceCheck, seconds: float) -> dict[str, Any]:
    """Provoke errors that are safe; record tinygrad's message and if the GPU then works."""
    found = {}
    until = time.monotonic() + seconds
    for name in ("misaligned", "unmapped", "hang"):
        wait = {_WAIT: _HANG_MS} if name == "hang" else {}
        said = check.try_probe(ProbeRequest(name, wait), until - time.monotonic())
        after = check.try_probe(ProbeRequest("computes"), until - time.monotonic())
        found[name] = {**said, "works_afterwards": after.get("sum") is True}
    return found


@dataclass(frozen=True)
class DriverChoiceQuestion:
    """The driver's choice and another, of one program, which has the question's name.

    `choice` and `variables` are the other's. `figure` decides: speeds by being larger, times by
    being smaller.
    """

    name: str
    figure: str
    own: str
    other: str
    choice: str = "-"
    variables: Mapping[str, str] = field(default_factory=dict)


_PACKED, _ALONE = "for the blocks of an SM", "for one block"
QUESTIONS = (
    DriverChoiceQuestion("l2", "read_gb_s", "volatile", "cacheable", variables={"TEGRA_L2": "2"}),
    DriverChoiceQuestion(
        "shared_memory", "launch_us", _PACKED, _ALONE, variables={"NV_SMEM_TARGET": "0"}
    ),
    DriverChoiceQuestion("preemption", "worst_us", "CILP", "wait for idle", "wait_for_idle"),
    DriverChoiceQuestion("rings", "submit_us", "cached", "write-combined", "write_combined"),
)
_RUN_SECONDS = 90.0


def time_driver_choices(check: DeviceCheck, seconds: float) -> Any:
    """Time the driver's choices, each against its alternative.

    The sides run as own, other, other, own, so that a drift does not look like a difference.
    """
    found: dict[str, Found] = {}
    until = time.monotonic() + seconds
    for question in QUESTIONS:
        own, other = (
            ProbeRequest(question.name),
            ProbeRequest(question.name, question.variables, question.choice),
        )
        runs: list[Found] = []
        for side in (own, other, other, own):
            if (left := until - time.monotonic()) <= 0:
                raise StepOutOfTime(seconds, found)
            runs.append(check.try_probe(side, min(left, _RUN_SECONDS)))
        found[question.name] = compare_driver_choice(question, [runs[0], runs[3]], runs[1:3])
    return found


def compare_driver_choice(
    question: DriverChoiceQuestion, own: Sequence[Found], other: Sequence[Found]
) -> Found:
    """Return what a report has of a question: the runs, own over other, and which is better.

    A side is better where all runs of it are better than all of the other, else they are the same.
    What failed has a verdict that says so and no `better`.
    """
    figure = question.figure
    entry: Found = {"own": question.own, "other": question.other, "figure": figure}
    entry |= {"with_own": own, "with_other": other, "ratio": None}
    if failed := [run["error"] for run in (*own, *other) if "error" in run]:
        return entry | {"verdict": f"no answer: {failed[0]}"}
    sign = 1 if figure.endswith("_gb_s") else -1
    mine, others = ([sign * float(run[figure]) for run in side] for side in (own, other))
    entry["ratio"] = round(median(mine) / median(others), 4)
    if min(mine) > max(others):
        said = {"better": "own", "verdict": f"{question.own} is better, as the driver has it"}
    elif max(mine) < min(others):
        verdict = f"{question.other} is better than what the driver has"
        said = {"better": "other", "verdict": verdict}
    else:
        said = {"better": "same", "verdict": "the same within what the runs differ by"}
    return entry | said


def _run_orinbench(check: DeviceCheck, seconds: float, *words: object) -> tuple[list[Any], bool]:
    """Return what a command of orinbench found on tinygrad's own driver, and if it had the time.

    Raises StepOutOfTime, and RuntimeError with its last line, where it found nothing.
    """
    command = [sys.executable, "-m", "orinbench", *words, "-o", "json"]
    ended = run_command(command, seconds, check.tinygrad_environment)
    try:
        return json.loads(ended.out), ended.status is not None
    except ValueError:
        _require_success(ended, seconds)
        raise RuntimeError(ended.last_error_line) from None


def run_orinbench_check(check: DeviceCheck, seconds: float) -> dict[str, Any]:
    """`orinbench check`: the fused kernels of a synthetic 160m against the float64 reference."""
    few = ("--shape", "tiny", "-n", "1") if check.simulated else ()
    found, whole = _run_orinbench(check, seconds, "check", "--backend", "tinygrad:NV", *few)
    if not found and not whole:
        raise StepOutOfTime(seconds)
    if not found:
        raise RuntimeError("the engine did not answer")
    return {"verdicts": found}


def run_llama_bench(check: DeviceCheck, seconds: float) -> dict[str, Any]:
    """`orinbench llama-bench` on tinygrad's own driver, by policy of the L2, and llama.cpp."""
    backends = ["tinygrad:NV", *["llama.cpp"] * (find_llama_bench(None) is not None)]
    words = ["llama-bench", "--backend", ",".join(backends), "--no-cold-start", "--no-history"]
    if check.simulated:
        words += ["--shape", "tiny", "-p", "4", "-n", "2", "-r", "1", "--no-check"]
    else:
        words += ["-m", str(check.model)] if check.model else ["--shape", "1b"]
        words += ["-p", "512", "-n", "128", "-r", "7", "--env", L2_POLICIES]
    records, whole = _run_orinbench(check, seconds, *words)
    if records and all(record.get("error") for record in records):
        raise RuntimeError(f"every case failed, the first one: {records[0]['error']}")
    found = {"records": records, "against_llama_cpp": comparisons_with_llama_cpp(records)}
    if not whole:
        raise StepOutOfTime(seconds, found)
    return found


def comparisons_with_llama_cpp(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return by test how tinygrad, as the driver has it, compares with llama.cpp."""
    return {
        str(record["test"]): comparison
        for record in records
        if not str(record.get("backend")).endswith(L2_POLICIES[-1])
        for comparison in record.get("comparisons") or []
        if comparison.get("baseline") == "llama.cpp"
    }


def read_kernel_log(check: DeviceCheck, seconds: float) -> dict[str, Any]:
    """The GPU's lines of the kernel log since the check began, the oldest first."""
    try:
        fd = os.open(_KMSG, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise StepNotPossible(
            f"/dev/kmsg: {reason}: as root, or with kernel.dmesg_restrict=0"
        ) from None
    found: list[str] = []
    try:
        while True:
            try:
                record = os.read(fd, 8192).decode(errors="replace")
            except BrokenPipeError:  # overwritten while we read: the next read goes on
                continue
            except BlockingIOError:
                return {"lines": found[-_MOST_LINES:]}
            head, _, text = record.partition(";")
            line = text.partition("\n")[0]
            if int(head.split(",")[2]) >= check.begun_us and _OURS.search(line):
                found.append(_NAMES.sub(r"\1\2<name>", line))
    finally:
        os.close(fd)


def _require_success(ended: CommandResult, seconds: float) -> None:
    if ended.status is None:
        raise StepOutOfTime(seconds)
    if ended.status != 0:
        raise RuntimeError(ended.last_error_line)


@dataclass(frozen=True)
class Step:
    """A step: its name in the report, the seconds it may take, and what it does."""

    name: str
    seconds: float
    take: Callable[[DeviceCheck, float], Any]
    about: str


# 36 minutes in all. What may leave the GPU unusable comes last.
STEPS = (
    Step("identity", 30, record_machine, "the board and its state"),
    Step("abi", 60, run_abi_probe, "struct sizes, characteristics, address spaces"),
    Step("smoke", 180, record_smoke_trace, "sums, copies, both windows; the trace"),
    Step("replay", 120, replay_trace_on_model, "the trace against the model of the drivers"),
    Step("queue", 60, measure_queue, "a full ring, and what the GPU writes into a QMD"),
    Step("coherence", 30, measure_coherence, "what CPU and GPU miss of each other's stores"),
    Step("memory", 60, find_memory_limit, "where memory ends, 1 GiB before the board's"),
    Step("performance", 300, time_driver_choices, "the driver's choices against others, in turns"),
    Step("check", 300, run_orinbench_check, "a model against the float64 reference"),
    Step("llama-bench", 780, run_llama_bench, "tinygrad and llama.cpp, in turn"),
    Step("faults", 240, provoke_faults, "errors that are safe to provoke"),
    Step("kernel-log", 20, read_kernel_log, "what the kernel said meanwhile"),
)
