"""The steps of a device check, in their order, each with its time.

A step returns its result, raises `NotRun` with the reason, or `OutOfTime` with what it has. No step
needs a person or changes the board, and what may crash the GPU runs in a process of its own.
"""

import errno
import grp
import json
import os
import re
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from orinbench.check.device.check import Ask, Check, NotRun, OutOfTime
from orinbench.check.device.gpu import Found
from orinbench.check.device.kernel_log import gpu_lines
from orinbench.check.device.performance import answers
from orinbench.child import CommandEnd, run
from orinbench.measure.backends.llama_cpp import find_llama_bench
from orinbench.measure.board import board_state
from orinbench.measure.environment import read_environment

CTRL, AS_NODE = "/dev/nvgpu/igpu0/ctrl", "/dev/nvgpu/igpu0/as"
NODES = (
    CTRL,
    AS_NODE,
    "/dev/nvgpu/igpu0/tsg",
    "/dev/nvgpu/igpu0/channel",
    "/dev/nvmap",
    "/dev/nvhost-ctrl-gpu",
    "/dev/dri/renderD128",
    "/dev/host1x-fence",
)
GROUPS = ("video", "render")
# Ways to share a buffer: the driver's TEGRA_L2, and what the program does before the CPU's turn.
COHERENCE = (("volatile", "0", "-"), ("flushed", "2", "-"), ("unflushed", "2", "no_flush"))
# A wait shorter than tinygrad's default, for a kernel that hangs on purpose.
_HANG_MS = "2000"
# nvgpusim replay's sum: "105 events of a board trace replayed on r36, 0 skipped, 0 differences".
_REPLAYED = re.compile(r"(\d+) events of a \w+ trace replayed on .*?(\d+) differences")


@dataclass(frozen=True)
class Step:
    """A step: its name in the report, the seconds it may take, and what it does."""

    name: str
    seconds: float
    take: Callable[[Check, float], Any]
    about: str


def identity(check: Check, seconds: float) -> dict[str, Any]:
    """The machine and its state."""
    return {"environment": asdict(read_environment()), "state": board_state().record()}


def permissions(check: Check, seconds: float) -> dict[str, Any]:
    """List the device nodes, their owners, and if this user may open them."""
    mine = {_group_name(number) for number in (*os.getgroups(), os.getegid())}
    return {
        "nodes": {path: _node(path) for path in NODES},
        "groups": [name for name in GROUPS if name in mine],
        "privileged": os.geteuid() == 0,
    }


def _node(path: str) -> dict[str, Any]:
    try:
        found = os.stat(path)
    except OSError:
        return {"exists": False}
    try:
        os.close(os.open(path, os.O_RDWR))
        opens = "ok"
    except OSError as error:
        # The as node makes an address space with 64 KiB pages when it is opened. Where big pages
        # are off, as on L4T, that is refused to whoever may open it (nvgpu: as.c, ioctl_as.c:402).
        allowed = path == AS_NODE and error.errno == errno.EINVAL
        opens = "ok" if allowed else os.strerror(error.errno or 0)
    group = _group_name(found.st_gid)
    return {
        "exists": True,
        "mode": f"0{stat.S_IMODE(found.st_mode) & 0o777:03o}",
        "group": group if group in ("root", *GROUPS) else "other",
        "opens": opens,
    }


def _group_name(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return "other"


def abi(check: Check, seconds: float) -> Any:
    """Record the drivers' answers to a client that shares nothing with tinygrad."""
    ended = run([sys.executable, "-m", "orinbench.check.device.abi_probe"], seconds)
    _expect(ended, seconds)
    return json.loads(ended.out)


def smoke(check: Check, seconds: float) -> Any:
    """tinygrad computes, with every call of it recorded into trace.jsonl."""
    with tempfile.TemporaryDirectory() as scratch:
        recorder = Path(scratch, "recorder.pyz")
        _expect(run([sys.executable, "-m", "nvgpusim", "recorder", recorder], seconds), seconds)
        return check.must(Ask("smoke"), seconds, (recorder, "-o", check.trace, "--"))


def replay_trace(check: Check, seconds: float) -> dict[str, Any]:
    """Replay the recorded calls and compare the model's answers with the board's."""
    if not check.trace.exists():
        raise NotRun("there is no trace: the step smoke made none")
    said = []
    for flags in ([], ["--addresses"]):
        command = [sys.executable, "-m", "nvgpusim", "replay", *flags, check.trace]
        ended = run(command, seconds)
        if ended.status != 1:  # 1: there are differences
            _expect(ended, seconds)
        said.append(f"{ended.out}\n{ended.err}")
    sums = [_REPLAYED.search(text) for text in said]
    plain, with_addresses = sums
    if plain is None or with_addresses is None:
        raise RuntimeError("nvgpusim replay printed no summary")
    return {
        "events": int(plain[1]),
        "differences": int(plain[2]),
        "address_differences": int(with_addresses[2]),
        "said": [line for line in said[0].splitlines() if line.strip()][:50],
    }


def faults(check: Check, seconds: float) -> dict[str, Any]:
    """Provoke errors that are safe; record tinygrad's message and if the GPU then works."""
    found = {}
    until = time.monotonic() + seconds
    for name in ("misaligned", "unmapped", "hang"):
        wait = {"HCQDEV_WAIT_TIMEOUT_MS": _HANG_MS} if name == "hang" else {}
        said = check.ask(Ask(name, wait), until - time.monotonic())
        after = check.ask(Ask("computes"), until - time.monotonic())
        found[name] = {**said, "works_afterwards": after.get("sum") is True}
    return found


def queue(check: Check, seconds: float) -> dict[str, Any]:
    """Measure the cost of a full ring and record what the GPU writes into a QMD."""
    return check.must(Ask("queue"), seconds)


def coherence(check: Check, seconds: float) -> dict[str, Any]:
    """Count what CPU and GPU miss of each other's stores: without the L2, flushed, not flushed."""
    until, found = time.monotonic() + seconds, {}
    for name, policy, choice in COHERENCE:
        ask = Ask("coherence", {"TEGRA_L2": policy}, choice)
        found[name] = check.must(ask, until - time.monotonic())
    return found


def performance(check: Check, seconds: float) -> Any:
    """Time the driver's choices, each against its alternative in turns."""
    found: dict[str, Found] = {}
    try:
        for name, answer in answers(check.ask, time.monotonic() + seconds):
            found[name] = answer
    except TimeoutError:
        raise OutOfTime(seconds, found) from None
    return found


def memory(check: Check, seconds: float) -> dict[str, Any]:
    """Find where memory ends: with an error of the driver, 1 GiB before the board has none."""
    return check.must(Ask("memory", {"TEGRA_RESERVE_MB": "1024"}), seconds)


def suite(check: Check, seconds: float) -> dict[str, Any]:
    """`orinbench suite`, on tinygrad's own driver."""
    little = ["--select", "alloc * 4 KiB", "-r", "1", "--no-roofline"]
    arguments = ["suite", "--device", "NV", *(little if check.simulated else [])]
    return bench(check, arguments, seconds)


def llama_bench(check: Check, seconds: float) -> dict[str, Any]:
    """`orinbench llama-bench` on tinygrad's own driver and llama.cpp, in one run."""
    backends = ["tinygrad:NV", *["llama.cpp"] * (find_llama_bench(None) is not None)]
    arguments = ["llama-bench", "--backend", ",".join(backends)]
    if check.simulated:
        arguments += ["--shape", "tiny", "-p", "4", "-n", "2", "-r", "1"]
        arguments += ["--no-check", "--no-cold-start"]
    else:
        arguments += ["-m", str(check.model)] if check.model else ["--shape", "1b"]
        arguments += ["-p", "512", "-n", "128", "-r", "7", "--no-cold-start"]
    return bench(check, arguments, seconds)


def bench(check: Check, arguments: Sequence[str], seconds: float) -> dict[str, Any]:
    """Run a command of orinbench that prints records; keep what it has when its time ends."""
    command = [sys.executable, "-m", "orinbench", *arguments, "-o", "json", "--no-history"]
    ended = run(command, seconds, check.environment)
    try:
        records = json.loads(ended.out)
    except ValueError:
        _expect(ended, seconds)
        raise RuntimeError(ended.reason) from None
    if records and all(record.get("error") for record in records):
        raise RuntimeError(f"every case failed, the first one: {records[0]['error']}")
    found = {"records": records, "against_llama_cpp": against_llama_cpp(records)}
    if ended.status is None:
        raise OutOfTime(seconds, found)
    return found


def against_llama_cpp(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return by test the comparison of tinygrad with llama.cpp in the same rounds."""
    found = {}
    for record in records:
        for comparison in record.get("comparisons") or []:
            if comparison.get("baseline") == "llama.cpp":
                keys = ("ratio", "ci_low", "ci_high", "verdict")
                found[str(record["test"])] = {key: comparison.get(key) for key in keys}
    return found


def kernel_log(check: Check, seconds: float) -> dict[str, Any]:
    """The GPU's lines of the kernel log since the check began."""
    try:
        return {"lines": gpu_lines(check.begun_us)}
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise NotRun(f"/dev/kmsg: {reason}: as root, or with kernel.dmesg_restrict=0") from None


def _expect(ended: CommandEnd, seconds: float) -> None:
    """Raise where a command did not end well in its time."""
    if ended.status is None:
        raise OutOfTime(seconds)
    if ended.status != 0:
        raise RuntimeError(ended.reason)


# 41 minutes in all. What may leave the GPU unusable comes last.
STEPS = (
    Step("identity", 30, identity, "the board and its state"),
    Step("permissions", 10, permissions, "device nodes, owners, groups"),
    Step("abi", 60, abi, "struct sizes, characteristics, address spaces"),
    Step("smoke", 180, smoke, "sums, copies, both windows; the trace"),
    Step("replay", 120, replay_trace, "the trace against the model of the drivers"),
    Step("queue", 60, queue, "a full ring, and what the GPU writes into a QMD"),
    Step("coherence", 30, coherence, "what CPU and GPU miss of each other's stores"),
    Step("memory", 60, memory, "where memory ends, 1 GiB before the board's"),
    Step("performance", 420, performance, "the driver's choices against others, in turns"),
    Step("suite", 600, suite, "orinbench suite"),
    Step("llama-bench", 600, llama_bench, "tinygrad and llama.cpp, in turn"),
    Step("faults", 240, faults, "errors that are safe to provoke"),
    Step("kernel-log", 20, kernel_log, "what the kernel said meanwhile"),
)
