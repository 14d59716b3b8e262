"""The commands as a user types them: on the CPU, and on an Orin that is simulated."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.patches.conftest import COMPILERS, wheel_file

from orinbench.suite.registry import BENCHMARKS

ROOT = Path(__file__).resolve().parents[3]
ORINBENCH = (sys.executable, "-m", "orinbench")


def test_ctrl_c_in_a_terminal_prints_what_was_measured(
    suite_environment: dict[str, str], tmp_path: Path
) -> None:
    command = [
        *(*ORINBENCH, "alloc", "--device", "CPU", "--sizes", "4K", "--ways", "cached"),
        *("-r", "100000", "-o", "json", "--progress", "--no-history"),
    ]
    with subprocess.Popen(
        command,
        env=os.environ | suite_environment | {"XDG_STATE_HOME": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        steps = (line for line in process.stderr if " left: " in line)
        for _ in range(6):  # opening, bandwidth and warm-up are steps too
            next(steps)
        process.send_signal(signal.SIGINT)
        out, err = process.stdout.read(), process.stderr.read()
    assert process.returncode == 130, err
    (record,) = json.loads(out)
    assert record["partial"] and len(record["samples_ns"]) >= 3
    assert record["extra"]["latencies"] == len(record["samples_ns"]) * record["extra"]["calls"]
    assert "Traceback" not in err


def on_the_simulator(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """Return the records of a command on a simulated Orin, one repetition a row."""
    environment = {name: str(wheel_file(pattern)) for name, pattern in COMPILERS.items()}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "nvgpusim", "--", *ORINBENCH, *arguments, "--device", "NV"),
            *("-r", "1", "-o", "json", "--no-history", "--no-roofline"),
        ],
        env=os.environ | environment | {"XDG_CACHE_HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    records: list[dict[str, Any]] = json.loads(done.stdout)
    for record in records:
        assert (record["device"], record["arch"]) == ("NV", "sm_87")
        assert len(record["samples_ns"]) == 1 and record["error"] is None
        assert record["peak_percent"] is None  # a simulated board has no clock
    return records


def test_a_simulated_orin_multiplies_matrices(tmp_path: Path) -> None:
    records = on_the_simulator(tmp_path, "matmul", "--sizes", "16", "--dtype", "fp32,fp16")
    assert [record["test"] for record in records] == ["fp32 16x16x16", "fp16 16x16x16"]
    for record in records:
        assert record["check"]["text"].startswith("off from numpy by at most")


def test_a_simulated_orin_runs_the_probes_of_16_byte_accesses(tmp_path: Path) -> None:
    # 1028 accesses: some threads of the grid have one, the others none
    records = on_the_simulator(tmp_path, "bandwidth", "--sizes", "16448")
    assert [record["test"].split()[0] for record in records] == ["read", "write", "copy"]
    for record in records:
        assert record["included"] == "one kernel, of 16-byte accesses"
        assert record["check"]["text"] == "every byte checked"


def test_there_is_an_app_for_each_command() -> None:
    text = (ROOT / "overlays" / "apps.nix").read_text()
    apps = re.findall(r'([\w-]+) = measure "([\w-]+)"', text)
    assert all(app == command for app, command in apps)
    assert {app for app, _ in apps} == {"suite", *BENCHMARKS}
