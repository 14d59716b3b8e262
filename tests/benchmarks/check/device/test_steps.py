"""Each step apart: what it finds, why it is not run, and what remains when its time runs out."""

import json
import os
import stat
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from tests.benchmarks.check.device.conftest import report, step
from tests.benchmarks.orinbench_command import Patch

from orinbench.check.device import steps
from orinbench.check.device.claims import ClaimOutcome, judge_claim, load_claims
from orinbench.check.device.steps import DeviceCheck, ProbeRequest, StepNotPossible, StepOutOfTime
from orinbench.child import run_command


@pytest.fixture
def check(tmp_path: Path) -> DeviceCheck:
    return DeviceCheck(tmp_path, True, 0)


def test_identity_is_of_this_machine(check: DeviceCheck) -> None:
    found = steps.record_machine(check, 1)
    assert found["environment"]["kernel"] == os.uname().release
    assert json.dumps(found) and isinstance(found["state"], dict)


def test_a_step_that_needs_something_says_what(check: DeviceCheck) -> None:
    with pytest.raises(StepNotPossible, match="there is no trace"):
        steps.replay_trace_on_model(check, 1)


FASTER = {"baseline": "llama.cpp", "ratio": 1.5, "verdict": "faster"}
RECORDS: list[dict[str, Any]] = [
    {
        "test": "tg128",
        "error": None,
        "backend": "tinygrad:NV TEGRA_L2=1",
        "comparisons": [FASTER, {"baseline": "tinygrad:CPU", "ratio": 9.0, "verdict": "faster"}],
    },
    {
        "test": "tg128",
        "error": None,
        "backend": "tinygrad:NV TEGRA_L2=2",  # not as the driver has it
        "comparisons": [{**FASTER, "verdict": "slower"}],
    },
    {"test": "pp512", "error": "died", "comparisons": None},
]


def bench_of(monkeypatch: Patch, tmp_path: Path, program: str) -> None:
    """Put a program in the place of `python -m orinbench`."""
    script = tmp_path / "bench.py"
    script.write_text(textwrap.dedent(program))

    def run_script(command: Any, *arguments: Any, **options: Any) -> Any:
        return run_command([sys.executable, script, *command[3:]], *arguments, **options)

    monkeypatch.setattr(steps, "run_command", run_script)


def test_llama_bench_keeps_records_and_how_they_compare(
    check: DeviceCheck, tmp_path: Path, monkeypatch: Patch
) -> None:
    bench_of(monkeypatch, tmp_path, f"print({json.dumps(RECORDS)!r})")
    found = steps.run_llama_bench(check, 60)
    assert found["records"] == RECORDS
    assert found["against_llama_cpp"] == {"tg128": FASTER}
    broken = json.dumps([RECORDS[2], RECORDS[2]])
    bench_of(monkeypatch, tmp_path, f"print({broken!r})")
    with pytest.raises(RuntimeError, match="every case failed, the first one: died"):
        steps.run_llama_bench(check, 60)
    bench_of(monkeypatch, tmp_path, "import sys; sys.exit('orinbench: no such shape')")
    with pytest.raises(RuntimeError, match="orinbench: no such shape"):
        steps.run_llama_bench(check, 60)


def test_llama_bench_keeps_what_it_has_when_its_time_ends(
    check: DeviceCheck, tmp_path: Path, monkeypatch: Patch
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
    with pytest.raises(StepOutOfTime) as raised:
        steps.run_llama_bench(check, 5)
    assert raised.value.result["records"] == RECORDS
    bench_of(monkeypatch, tmp_path, "import time; time.sleep(600)")
    with pytest.raises(StepOutOfTime) as raised:
        steps.run_llama_bench(check, 1)
    assert raised.value.result is None


@pytest.mark.parametrize(("status", "passed"), [(0, True), (3, False)])
def test_the_check_of_a_board_keeps_verdicts(
    tmp_path: Path, monkeypatch: Patch, status: int, passed: bool
) -> None:
    program = f"""
        import json, os, sys
        said = " ".join(sys.argv[1:])
        print(json.dumps([{{"passed": {passed}, "fused": True, "said": said, **os.environ}}]))
        sys.exit({status})
    """
    bench_of(monkeypatch, tmp_path, program)
    found = steps.run_orinbench_check(DeviceCheck(tmp_path, False, 0), 60)
    (verdict,) = found["verdicts"]
    assert verdict["said"] == "check --backend tinygrad:NV -o json"
    assert verdict["DEV"] == "TEGRA+NV" and verdict["passed"] == passed
    (claim,) = [claim for claim in load_claims() if claim.id == "numbers.fused"]
    taken = report(check=step(found))
    assert (judge_claim(claim, taken)[0] is ClaimOutcome.CONFIRMED) == passed


def test_a_check_of_a_board_that_finds_nothing(
    check: DeviceCheck, tmp_path: Path, monkeypatch: Patch
) -> None:
    bench_of(monkeypatch, tmp_path, "import sys; print([]); sys.exit(1)")
    with pytest.raises(RuntimeError, match="did not answer"):
        steps.run_orinbench_check(check, 60)
    bench_of(monkeypatch, tmp_path, "import time; time.sleep(600)")
    with pytest.raises(StepOutOfTime):
        steps.run_orinbench_check(check, 1)


def test_llama_bench_asks_for_what_a_board_can_do(tmp_path: Path, monkeypatch: Patch) -> None:
    program = "import json, sys; print(json.dumps([{'test': ' '.join(sys.argv[1:])}]))"
    bench_of(monkeypatch, tmp_path, program)
    monkeypatch.setattr(steps, "find_llama_bench", lambda _: Path("llama-bench"))

    def said(**more: Any) -> str:
        found = steps.run_llama_bench(
            DeviceCheck(tmp_path, **{"simulated": False, "begun_us": 0, **more}), 60
        )
        return str(found["records"][0]["test"])

    board = said()
    assert "tinygrad:NV,llama.cpp --no-cold-start --no-history --shape 1b -p 512 -n 128" in board
    assert "--env TEGRA_L2=1,2" in board
    assert "-m model.gguf -p 512" in said(model=Path("model.gguf"))
    assert "--shape tiny" in said(simulated=True)


def test_a_gpu_program_that_ends_without_a_word(
    check: DeviceCheck, tmp_path: Path, monkeypatch: Patch
) -> None:
    def ends_as(*command: str, seconds: float = 60) -> None:
        monkeypatch.setattr(steps, "run_command", lambda *_: run_command(command, seconds))

    ends_as(sys.executable, "-c", "raise SystemExit('x')")
    assert check.try_probe(ProbeRequest("smoke"), 60) == {"error": "x"}
    for take in (
        steps.record_smoke_trace,
        steps.run_abi_probe,
        steps.measure_queue,
        steps.find_memory_limit,
    ):
        with pytest.raises(RuntimeError, match="x"):
            take(check, 60)
    ends_as(sys.executable, "-c", "")
    (tmp_path / "trace.jsonl").touch()
    with pytest.raises(RuntimeError, match="no sum"):
        steps.replay_trace_on_model(check, 60)
    ends_as("sleep", "600", seconds=0.2)
    assert check.try_probe(ProbeRequest("smoke"), 7) == {"error": "not done in 7 s"}
    with pytest.raises(StepOutOfTime):
        steps.measure_queue(check, 60)


def test_kernel_log(monkeypatch: Patch) -> None:
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
    (line,) = steps.read_kernel_log(DeviceCheck(Path(), False, 1000), 1)["lines"]
    assert line == "nvgpu: 17000000.gpu mmu_fault pid <name> comm: <name>"


def test_a_closed_kernel_log_is_no_failure(check: DeviceCheck, monkeypatch: Patch) -> None:
    monkeypatch.setattr(steps, "_KMSG", "/nowhere/kmsg")
    with pytest.raises(StepNotPossible, match=r"/dev/kmsg: No such file.*kernel.dmesg_restrict=0"):
        steps.read_kernel_log(check, 1)
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)
