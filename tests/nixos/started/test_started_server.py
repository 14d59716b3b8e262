"""The language model server's unit under a real systemd, with a real model on the CPU.

ORIN_LOAD_SECONDS=70 makes the slow load last longer than a minute, as on a board; 12 shows the
same, because this systemd gives other units 5 s to start.
"""

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.nixos.pid1 import PYTHON, Machine, python_program, refusal, with_checkout
from tests.nixos.recorded import recorded

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / ".venv" / "SmolLM2-135M-Instruct.Q4_1.gguf"
reason = refusal()
if reason is None and not MODEL.exists():
    reason = f"{MODEL}: not here: make .venv/.smollm2"
pytestmark = pytest.mark.skipif(reason is not None, reason=str(reason))

LOAD_SECONDS = float(os.environ.get("ORIN_LOAD_SECONDS", "12"))
NAME = "orin-llm-server-{}.service"
MAIN, SLOW, WRONG, GONE = (NAME.format(name) for name in ("main", "slow", "wrong", "gone"))
PORTS = {"slow": 8001, "wrong": 8002, "gone": 8003}
FILE = "/var/lib/models/{}.gguf"
#: A disk that is plugged in after the start: its mount waits for the kernel to find it.
DISK, MOUNT, FOUND = "/var/lib/disk", "var-lib-disk.mount", "found.service"
PROGRAMS = {
    "python3": with_checkout(f'exec {PYTHON}/bin/python3 "$@"'),
    # A disk that takes its time, before anything else.
    "orinllm": f'case "$*" in *slow.gguf*) sleep {LOAD_SECONDS};; esac\n'
    + python_program("orinllm.command.cli"),
    "setupConf": "sleep 1",
    "nvpmodel": "exec true",
    "jetson_clocks": "exec sleep 1",
}


def variant(text: str, name: str) -> str:
    """Write the unit of another model than `main`."""
    text = text.replace("model.gguf", f"{name}.gguf").replace(
        "--port 8000", f"--port {PORTS[name]}"
    )
    text = text.replace("-main", f"-{name}").replace("models.main.", f"models.{name}.")
    text = text.replace("--alias main", f"--alias {name}")
    return text.replace("WantedBy=multi-user.target", "")


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """A machine that is booting, with the server of a good model, and of three others by hand."""
    kept = recorded()
    units = {name: kept[name] for name in ("nvpmodel.service", "jetson_clocks.service")}
    # The CPU for a GPU, and a watchdog that a test can wait for.
    text = kept[MAIN].replace("[Service]\n", '[Service]\nEnvironment="DEV=CPU"\n')
    text = text.replace("WatchdogSec=60", "WatchdogSec=8").replace("--grace 30", "--grace 2")
    text = text.replace(" serve ", " serve --device CPU --context 512 ")
    units |= {MAIN: text} | {NAME.format(name): variant(text, name) for name in PORTS}
    units[SLOW] = units[SLOW].replace(FILE.format("slow"), f"{DISK}/slow.gguf")
    units[FOUND] = (
        "[Service]\nType=oneshot\nRemainAfterExit=yes\n"
        "ExecStart=/bin/sh -c 'until test -e /run/plugged; do sleep 0.1; done'\n"
    )
    units[MOUNT] = (
        f"[Unit]\nRequires={FOUND}\nAfter={FOUND}\n"
        f"[Mount]\nWhat=/srv/disk\nWhere={DISK}\nType=none\nOptions=rbind\n"
    )
    models = {FILE.format("model"): MODEL.resolve(), "/srv/disk/slow.gguf": MODEL.resolve()}
    machine = Machine(tmp_path_factory.mktemp("machine"), units, PROGRAMS, models)
    machine.write(
        "/nix/store/power_mode.py", (ROOT / "nixos/modules/performance/power_mode.py").read_text()
    )
    machine.write(FILE.format("wrong"), "GGUF, and then not")
    machine.write("/etc/systemd/system.conf", "[Manager]\nDefaultTimeoutStartSec=5\n")
    with machine:
        yield machine


def until(condition: Callable[[], object], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "not within the time"
        time.sleep(0.2)


def ask(machine: Machine, model: str = "main", port: int = 8000) -> Any:
    said = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"model": model, "messages": said, "max_tokens": 8, "temperature": 0}
    status, text = machine.http(f"http://127.0.0.1:{port}/v1/chat/completions", body)
    assert status == 200, text
    return json.loads(text)


def began(machine: Machine, unit: str) -> int:
    name = "ExecMainStartTimestampMonotonic"
    return int(machine.show(unit, name)[name])


def test_a_slow_disk_and_a_long_load_are_waited_for(machine: Machine) -> None:
    """The other tests run meanwhile; this one asks for the first time, the last for the end."""
    machine.run("systemctl", "start", "--no-block", SLOW)
    jobs = machine.run("systemctl", "list-jobs", "--no-legend").stdout
    assert re.search(rf"{SLOW} +start waiting", jobs) and f"{MOUNT}" in jobs
    machine.put("/run/plugged", b"")
    assert machine.wait(SLOW, "activating", 60)["NRestarts"] == "0"


def test_at_boot_it_comes_after_the_power_mode_and_is_up_when_it_answers(machine: Machine) -> None:
    assert machine.wait(MAIN, "active", 240)["NRestarts"] == "0"
    clocks = machine.show("jetson_clocks.service", "ExecMainExitTimestampMonotonic")
    assert 0 < int(clocks["ExecMainExitTimestampMonotonic"]) <= began(machine, MAIN)
    answer = ask(machine)
    assert "Paris" in answer["choices"][0]["message"]["content"]
    assert answer["usage"]["completion_tokens"] <= 8


def test_it_is_nobody_and_listens_on_the_loopback_alone(machine: Machine) -> None:
    pid = machine.show(MAIN, "MainPID")["MainPID"]
    assert machine.run("stat", "--format=%u", f"/proc/{pid}").stdout.strip() != "0"
    # Local addresses of listening sockets (state 0A), in hexadecimal; 1F40 is port 8000.
    table = machine.run("cat", f"/proc/{pid}/net/tcp").stdout.splitlines()
    listening = {line.split()[1] for line in table if line.split()[3] == "0A"}
    assert "0100007F:1F40" in listening
    assert all(address.startswith("0100007F:") for address in listening)
    status, text = machine.http("http://127.0.0.1:8000/metrics")
    assert status == 200 and "orinllm_generation_tokens_total" in text


def test_a_crash_is_a_new_process_within_seconds(machine: Machine) -> None:
    before = machine.show(MAIN, "MainPID")["MainPID"]
    assert before != "0"
    machine.run("kill", "-KILL", before)
    until(lambda: machine.show(MAIN, "MainPID")["MainPID"] not in ("0", before), 10)
    after = machine.wait(MAIN, "active", 240)
    assert after["NRestarts"] == "1" and ask(machine)["choices"]


def test_a_stop_ends_it_in_order(machine: Machine) -> None:
    machine.run("systemctl", "stop", MAIN)
    ended = machine.show(MAIN, "ActiveState", "Result", "ExecMainStatus")
    assert ended == {"ActiveState": "inactive", "Result": "success", "ExecMainStatus": "0"}
    assert machine.http("http://127.0.0.1:8000/health")[0] == 0


@pytest.mark.parametrize(
    ("unit", "why"),
    [(GONE, "no such file; a GGUF model was expected"), (WRONG, "GGUF")],
)
def test_a_wrong_model_fails_three_times_and_says_why(
    machine: Machine, unit: str, why: str
) -> None:
    started = time.monotonic()
    machine.run("systemctl", "start", unit, check=False)
    until(lambda: "start request repeated too quickly" in machine.journal(unit).lower(), 60)
    assert machine.wait(unit, "failed", 10)["NRestarts"] == "3"
    assert time.monotonic() - started < 60
    status = machine.run("systemctl", "status", "--full", unit, check=False).stdout
    said = [line for line in status.splitlines() if line.strip().startswith("Status: ")]
    assert len(said) == 1 and why in said[0] and ".gguf" in said[0]


def test_the_long_load_ends_with_an_answer(machine: Machine) -> None:
    end = machine.wait(SLOW, "active", LOAD_SECONDS + 240)
    assert end["NRestarts"] == "0" and ask(machine, "slow", PORTS["slow"])["choices"]
    ready = machine.show(SLOW, "ActiveEnterTimestampMonotonic")["ActiveEnterTimestampMonotonic"]
    assert int(ready) - began(machine, SLOW) > LOAD_SECONDS * 1e6


def test_one_that_hangs_is_killed_by_the_watchdog_and_may_be_stopped_while_it_loads(
    machine: Machine,
) -> None:
    before = machine.show(SLOW, "MainPID")["MainPID"]
    assert before != "0"  # which means all of the caller's group: the tests would stop
    machine.run("kill", "-STOP", before)
    until(lambda: machine.show(SLOW, "MainPID")["MainPID"] not in ("0", before), 60)
    assert "Watchdog timeout" in machine.journal(SLOW)
    assert machine.wait(SLOW, "activating", 5)["NRestarts"] == "1"
    started = time.monotonic()
    machine.run("systemctl", "stop", SLOW)
    assert machine.wait(SLOW, "inactive", 5)["MainPID"] == "0"
    assert time.monotonic() - started < 20
