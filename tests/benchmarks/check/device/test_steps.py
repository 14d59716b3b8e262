"""Each step apart: what it finds, why it is not run, and what remains when its time runs out."""

import errno
import json
import os
import stat
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from orinbench.check.device import check as check_module
from orinbench.check.device import kernel_log, steps
from orinbench.check.device.check import Ask, Check, NotRun, OutOfTime
from orinbench.child import run


@pytest.fixture
def check(tmp_path: Path) -> Check:
    return Check(tmp_path, True, 0)


def test_identity_is_of_this_machine(check: Check) -> None:
    found = steps.identity(check, 1)
    assert found["environment"]["kernel"] == os.uname().release
    assert json.dumps(found) and isinstance(found["state"], dict)


def test_permissions(check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = tmp_path / "ctrl"
    node.touch()
    node.chmod(0o660)
    monkeypatch.setattr(steps, "NODES", (str(node), str(tmp_path / "none"), str(tmp_path)))
    found = steps.permissions(check, 1)
    nodes = found["nodes"]
    assert nodes[str(node)]["mode"] == "0660" and nodes[str(node)]["opens"] == "ok"
    assert nodes[str(tmp_path / "none")] == {"exists": False}
    assert nodes[str(tmp_path)]["opens"] == os.strerror(errno.EISDIR)
    assert nodes[str(node)]["group"] in ("root", "video", "render", "other")
    assert found["privileged"] is (os.geteuid() == 0)
    monkeypatch.setattr(os, "getgroups", lambda: [1 << 30])
    assert steps.permissions(check, 1)["groups"] == []


def test_a_step_that_needs_something_says_what(check: Check) -> None:
    with pytest.raises(NotRun, match="there is no trace"):
        steps.replay_trace(check, 1)


FASTER = {"ratio": 1.5, "ci_low": 1.4, "ci_high": 1.6, "verdict": "faster"}
RECORDS: list[dict[str, Any]] = [
    {
        "test": "tg128",
        "error": None,
        "comparisons": [
            {
                "baseline": "llama.cpp",
                "ratio": 1.5,
                "ci_low": 1.4,
                "ci_high": 1.6,
                "verdict": "faster",
            },
            {"baseline": "tinygrad:CPU", "ratio": 9.0, "verdict": "faster"},
        ],
    },
    {"test": "pp512", "error": "died", "comparisons": None},
]


def bench_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str) -> None:
    """Put a program in the place of `python -m orinbench`."""
    script = tmp_path / "bench.py"
    script.write_text(textwrap.dedent(program))

    def run_script(command: Any, *arguments: Any, **options: Any) -> Any:
        return run([sys.executable, script, *command[3:]], *arguments, **options)

    monkeypatch.setattr(steps, "run", run_script)


def test_bench_keeps_records_and_how_they_compare(
    check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench_of(monkeypatch, tmp_path, f"print({json.dumps(RECORDS)!r})")
    found = steps.bench(check, ["suite"], 60)
    assert found["records"] == RECORDS
    assert found["against_llama_cpp"] == {"tg128": FASTER}
    broken = json.dumps([RECORDS[1], RECORDS[1]])
    bench_of(monkeypatch, tmp_path, f"print({broken!r})")
    with pytest.raises(RuntimeError, match="every case failed, the first one: died"):
        steps.bench(check, ["suite"], 60)
    bench_of(monkeypatch, tmp_path, "import sys; sys.exit('orinbench: no such shape')")
    with pytest.raises(RuntimeError, match="orinbench: no such shape"):
        steps.bench(check, ["suite"], 60)


def test_bench_keeps_what_it_has_when_its_time_ends(
    check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = f"""
        import signal, sys, time
        def end(*_):
            print({json.dumps(RECORDS)!r}, flush=True)
            sys.exit(130)
        signal.signal(signal.SIGTERM, end)
        time.sleep(600)
    """
    bench_of(monkeypatch, tmp_path, program)
    with pytest.raises(OutOfTime) as raised:
        steps.bench(check, ["suite"], 5)
    assert raised.value.result["records"] == RECORDS
    bench_of(monkeypatch, tmp_path, "import time; time.sleep(600)")
    with pytest.raises(OutOfTime) as raised:
        steps.bench(check, ["suite"], 1)
    assert raised.value.result is None


def test_both_benchmarks_ask_for_what_a_board_can_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "import json, sys; print(json.dumps([{'test': ' '.join(sys.argv[1:])}]))"
    bench_of(monkeypatch, tmp_path, program)
    monkeypatch.setattr(steps, "find_llama_bench", lambda _: Path("llama-bench"))

    def said(take: Any, **more: Any) -> str:
        found = take(Check(tmp_path, **{"simulated": False, "begun_us": 0, **more}), 60)
        return str(found["records"][0]["test"])

    board = said(steps.llama_bench)
    assert "--backend tinygrad:NV,llama.cpp --shape 1b -p 512 -n 128" in board
    assert "-m model.gguf -p 512" in said(steps.llama_bench, model=Path("model.gguf"))
    assert "--shape tiny" in said(steps.llama_bench, simulated=True)
    assert said(steps.suite) == "suite --device NV -o json --no-history"
    assert "--select alloc * 4 KiB -r 1 --no-roofline" in said(steps.suite, simulated=True)


def test_a_gpu_program_that_ends_without_a_word(
    check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends_as(*command: str, seconds: float = 60) -> None:
        for module in (steps, check_module):
            monkeypatch.setattr(module, "run", lambda *_: run(command, seconds))

    ends_as(sys.executable, "-c", "raise SystemExit('x')")
    assert check.ask(Ask("smoke"), 60) == {"error": "x"}
    for step in (steps.smoke, steps.abi, steps.queue, steps.memory):
        with pytest.raises(RuntimeError, match="x"):
            step(check, 60)
    ends_as(sys.executable, "-c", "")
    (tmp_path / "trace.jsonl").touch()
    with pytest.raises(RuntimeError, match="no sum"):
        steps.replay_trace(check, 60)
    ends_as("sleep", "600", seconds=0.2)
    assert check.ask(Ask("smoke"), 7) == {"error": "not done in 7 s"}
    with pytest.raises(OutOfTime):
        steps.queue(check, 60)


def test_kernel_log(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    fd = os.open(os.devnull, os.O_RDONLY)
    records: list[bytes | OSError] = [
        b"6,1,500,-;nvgpu: 17000000.gpu too early\n",
        b"6,2,1500,-;usb 1-1: new device of Maria\n",
        BrokenPipeError(),
        b"3,3,2000,-;nvgpu: 17000000.gpu mmu_fault pid 4711 comm: secret.py\n SUB=x\n",
        BlockingIOError(),
    ]

    def read(_: int, __: int) -> bytes:
        record = records.pop(0)
        if isinstance(record, OSError):
            raise record
        return record

    monkeypatch.setattr(os, "open", lambda *_: fd)
    monkeypatch.setattr(os, "read", read)
    (line,) = kernel_log.gpu_lines(1000)
    assert line == "nvgpu: 17000000.gpu mmu_fault pid <name> comm: <name>"


def test_a_closed_kernel_log_is_no_failure(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_log, "_KMSG", "/nowhere/kmsg")
    with pytest.raises(NotRun, match=r"/dev/kmsg: No such file.*kernel.dmesg_restrict=0"):
        steps.kernel_log(check, 1)
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)
