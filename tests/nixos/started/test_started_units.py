"""The evaluated units under a real systemd: order at boot, readback, exporter, Prometheus.

`recorded/` holds the units, `pid1.py` starts them. The programs are this checkout's and Debian's.
"""

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from tests.nixos.fake_board import config, write_board
from tests.nixos.pid1 import (
    CHECKOUT,
    PYTHON,
    Machine,
    python_program,
    refusal,
    with_checkout,
)
from tests.nixos.recorded import recorded, units

ROOT = Path(__file__).resolve().parents[3]
MODULES = ROOT / "nixos" / "modules"
NODE_EXPORTER = shutil.which("prometheus-node-exporter") or shutil.which("node_exporter")
reason = refusal()
if reason is None and not (shutil.which("prometheus") and NODE_EXPORTER):
    reason = "Prometheus: not here: apt-get install prometheus prometheus-node-exporter"
pytestmark = pytest.mark.skipif(reason is not None, reason=str(reason))

PROGRAMS = {
    "python3": with_checkout(f'exec {PYTHON}/bin/python3 "$@"'),
    "jetson-exporter": python_program("orinexporter.cli"),
    "prometheus": 'exec prometheus "$@"',
    "node_exporter": f'exec {NODE_EXPORTER} "$@"',
    # NVIDIA's, which need a board: they leave word that they ran.
    "setupConf": "sleep 1",
    "nvpmodel": 'echo "nvpmodel $*" >>/run/asked',
    "jetson_clocks": "echo jetson_clocks >>/run/asked",
}
READBACK = "orin-performance-readback.service"
#: An exporter on an address of the network, which is not there yet.
LATE, ADDRESS = "late-exporter.service", "10.9.0.2"


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """A board of files, in the mode that is asked for, with the units of telemetry and power."""
    folder = tmp_path_factory.mktemp("machine")
    prometheus = json.loads(recorded()["prometheus.json"])
    prometheus["rule_files"] = [f"{CHECKOUT}/telemetry/rules/{n}" for n in prometheus["rule_files"]]
    for key in ("scrape_interval", "evaluation_interval"):
        prometheus["global"][key] = "1s"
    elsewhere = re.compile("llm|gpu|cache|container|harmonia|restic|upgrade")
    texts = {name: text for name, text in units().items() if not elsewhere.search(name)}
    exporter = "jetson-exporter.service"
    texts[exporter] = texts[exporter].replace("--listen", "--replay /srv/recording --listen")
    late = texts[exporter].replace("127.0.0.1:9401", f"{ADDRESS}:9401")
    texts[LATE] = late.replace("RestartSec=5", "RestartSec=100ms").partition("[Install]")[0]
    texts[READBACK] = texts[READBACK].replace(" check ", " check --root /srv/board ")
    script = "orin-grafana-secrets-start"
    machine = Machine(
        folder, texts, PROGRAMS | {script: f"set -e\n{recorded()[f'{script}.sh']}"}, {}
    )
    machine.write("/nix/store/power_mode.py", (MODULES / "performance/power_mode.py").read_text())
    machine.write("/nix/store/prometheus.yml-checkconfig-checked", json.dumps(prometheus))
    # However slow this machine is, a unit without limits of its own starts three times.
    limits = "[Manager]\nDefaultStartLimitIntervalSec=1h\nDefaultStartLimitBurst=3\n"
    machine.write("/etc/systemd/system.conf", limits)
    machine.write("/etc/nvpmodel.conf", config())
    recording = (ROOT / "telemetry/boards/agx-orin/recording.jsonl").read_text()
    machine.write("/srv/recording/recording.jsonl", recording)
    write_board(machine.folder("/srv/board"), "MAXN", pinned=True)
    machine.folder("/var/lib/orin-textfile")
    with machine:
        yield machine


def until(condition: Callable[[], object], seconds: float = 60) -> object:
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "not within the time"
        time.sleep(0.3)
    return found


def query(machine: Machine, expression: str) -> list[dict[str, Any]]:
    status, text = machine.http(f"http://127.0.0.1:9090/api/v1/query?query={quote(expression)}")
    return list(json.loads(text)["data"]["result"]) if status == 200 else []


def test_the_power_mode_is_set_once_and_before_the_clocks(machine: Machine) -> None:
    machine.wait(READBACK, "active", 60)
    assert machine.run("cat", "/run/asked").stdout.splitlines() == [
        "nvpmodel -f /etc/nvpmodel.conf -m 0",
        "jetson_clocks",
    ]
    order = ("nvpmodel.service", "jetson_clocks.service", READBACK)
    begun, ended = (
        [int(machine.show(unit, name)[name]) for unit in order]
        for name in ("ExecMainStartTimestampMonotonic", "ExecMainExitTimestampMonotonic")
    )
    assert 0 < ended[0] <= begun[1] and ended[1] <= begun[2]


def test_a_board_that_did_not_follow_is_a_failed_unit_with_its_reason(machine: Machine) -> None:
    assert "the board is in MAXN with pinned clocks" in machine.journal(READBACK)
    gpu = "/srv/board/sys/devices/platform/17000000.gpu/devfreq_dev/max_freq"
    machine.run("sh", "-c", f"echo 612000000 >{gpu}")
    assert machine.run("systemctl", "restart", READBACK, check=False).returncode == 1
    assert machine.wait(READBACK, "failed", 10)["Result"] == "exit-code"
    assert "612000000, MAXN wants 1300500000" in machine.journal(READBACK)
    until(lambda: query(machine, 'ALERTS{alertname="OrinUnitFailed"}'))
    alert = query(machine, 'ALERTS{alertname="OrinUnitFailed"}')
    assert [str(each["metric"]).count(READBACK) for each in alert] == [1]


def test_every_scrape_of_the_host_is_up_but_that_of_the_model(machine: Machine) -> None:
    """No model is served here; the exporter of debugfs serves with nothing to read."""
    machine.wait("prometheus.service", "active", 60)
    jobs = {job["job_name"] for job in json.loads(recorded()["prometheus.json"])["scrape_configs"]}
    assert {"jetson", "jetson-debugfs", "llm-main", "node", "prometheus"} == jobs

    def up(value: int) -> set[str]:
        return {each["metric"]["job"] for each in query(machine, f"up == {value}")}

    until(lambda: (up(1), up(0)) == (jobs - {"llm-main"}, {"llm-main"}))
    assert until(lambda: query(machine, "jetson_module_power_watts"))
    _, text = machine.http("http://127.0.0.1:9090/api/v1/rules")
    rules = [rule for group in json.loads(text)["data"]["groups"] for rule in group["rules"]]
    assert len(rules) > 10 and not [rule for rule in rules if rule.get("lastError")]


def test_an_exporter_that_is_killed_comes_back_as_nobody_in_particular(machine: Machine) -> None:
    unit = "jetson-exporter.service"
    before = machine.wait(unit, "active", 30)["MainPID"]
    assert before != "0"
    assert machine.run("stat", "--format=%u", f"/proc/{before}").stdout.strip() != "0"
    machine.run("kill", "-KILL", before)
    until(lambda: machine.show(unit, "MainPID")["MainPID"] not in ("0", before), 30)
    until(lambda: machine.http("http://127.0.0.1:9401/metrics")[0] == 200, 30)
    assert machine.show(unit, "NRestarts")["NRestarts"] == "1"


def test_an_address_that_comes_late_is_waited_for(machine: Machine) -> None:
    machine.run("systemctl", "start", LATE)
    until(lambda: int(machine.show(LATE, "NRestarts")["NRestarts"]) > 3)
    assert machine.http(f"http://{ADDRESS}:9401/metrics")[0] == 0
    machine.run("ip", "address", "add", f"{ADDRESS}/32", "dev", "lo")
    until(lambda: machine.http(f"http://{ADDRESS}:9401/metrics")[0] == 200)
    machine.run("systemctl", "stop", LATE)


def test_a_board_makes_the_secrets_of_its_grafana_once(machine: Machine) -> None:
    unit = "orin-grafana-secrets.service"
    machine.run("systemctl", "start", unit)
    folder = "/var/lib/orin-grafana"
    listed = machine.run("stat", "--format=%a %U", folder, f"{folder}/grafana-secret-key")
    assert listed.stdout.split("\n")[:2] == ["700 root", "400 root"]
    password = machine.run("cat", f"{folder}/grafana-admin-password").stdout
    assert password in machine.run("cat", "/dev/console").stdout
    assert password not in machine.journal(unit)
    machine.run("systemctl", "restart", unit)
    assert machine.run("cat", f"{folder}/grafana-admin-password").stdout == password
