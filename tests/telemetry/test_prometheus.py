"""End to end: a board, the exporter, a real Prometheus with our rules, node_exporter's textfile."""

import contextlib
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from tests.telemetry.conftest import HWMON, RULES, TELEMETRY, idle, supply, until
from tests.telemetry.prometheus import Prometheus, answer, free_port

from orinbench.measure.board import MeasuredEnergy, measure_energy, write_metrics_file
from orinboard.energy import EnergySampler
from orinboard.replay import Frame, RecordingPlayer
from orinboard.sources import BoardReader
from orinexporter.exporter import Exporter
from orinexporter.web import ExporterServer

DASHBOARDS = runpy.run_path(str(TELEMETRY / "dashboards" / "build.py"))
pytestmark = pytest.mark.skipif(
    not shutil.which("prometheus"), reason="prometheus is not installed"
)

#: As Debian calls it, and as everybody else does.
NODE_EXPORTER = shutil.which("prometheus-node-exporter") or shutil.which("node_exporter")
#: The board idles, then works for 10 s in a staircase of power, and is throttled meanwhile.
IDLE_SECONDS, WORK_SECONDS = 8.0, 10.0
TOKENS = 400


def frames() -> Iterator[Frame]:
    yield Frame(0.0, idle())
    steps = round(WORK_SECONDS / 0.5)
    for step in range(steps):
        tree: dict[str, Any] = supply(18.0 + 2 * (step % 8), 3.0, 7.5, 1.9)
        if step == 4:
            tree |= {f"{HWMON}/hwmon5/oc1_event_cnt": "1\n"}
        yield Frame(IDLE_SECONDS + step * 0.5, tree)
    yield Frame(IDLE_SECONDS + WORK_SECONDS, supply(2.4, 0.4, 3.8, 0.4))


@dataclass(frozen=True)
class Machine:
    """The tests' machine: Prometheus, and the record of the run that the board went through."""

    prometheus: Prometheus
    run: MeasuredEnergy
    record: dict[str, Any]


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory, patient: None) -> Iterator[Machine]:
    """The whole chain, after one benchmark run on a board that was throttled."""
    texts = tmp_path_factory.mktemp("textfile")
    served = Served()
    llm, llm_thread = start_http_server(0, "127.0.0.1", served.registry)
    node_port = free_port()
    node = start_node_exporter(texts, node_port)
    player = RecordingPlayer(list(frames()), hold=600)
    try:
        with player, BoardReader(player.stage.roots) as board:
            begun = time.monotonic()
            roots = player.stage.roots
            chain = Exporter(board, EnergySampler(roots, monotonic=True))
            with chain, ExporterServer(("127.0.0.1", 0), chain) as server:
                targets = {
                    "jetson": ["{}:{}".format(*server.address)],
                    "llm": [f"127.0.0.1:{llm.server_address[1]}"],
                } | ({"node": [f"127.0.0.1:{node_port}"]} if node else {})
                with Prometheus(targets, RULES) as prometheus:
                    # A second of idling on either side: scrapes lag behind, and what the board
                    # draws while they do should not be much.
                    assert until(lambda: prometheus.query("jetson_energy_joules_total"))
                    time.sleep(max(begun + IDLE_SECONDS - 1 - time.monotonic(), 0))
                    with measure_energy(roots) as run:
                        for _ in range(20):
                            served.answer()
                            time.sleep((WORK_SECONDS + 2) / 20)
                    record: dict[str, Any] = {
                        "model_type": "1B Q6_K",
                        "backend": "tinygrad:NV",
                        "test": "tg400",
                    }
                    record |= {"median_ts": 50.0} | run.record_fields(TOKENS)
                    record |= {"ttft_warm_s": 0.3, "roofline_percent": 61.0}
                    write_metrics_file([record], texts)
                    time.sleep(1.5)
                    yield Machine(prometheus, run, record)
    finally:
        llm.shutdown()
        llm_thread.join()
        if node:
            node.terminate()
            node.wait()


class Served:
    """An LLM server's counters, by the names of `orinllm serve`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._generated = Counter("orinllm_generation_tokens", "Tokens.", registry=self.registry)
        self._prompt = Counter("orinllm_prompt_tokens", "Tokens.", registry=self.registry)
        self._joules = Counter("orinllm_energy_joules", "J.", ["phase"], registry=self.registry)
        self._first = Histogram("orinllm_time_to_first_token_seconds", "s", registry=self.registry)
        for name in ("running", "waiting"):
            Gauge(f"orinllm_num_requests_{name}", "Requests.", registry=self.registry).set(0)

    def answer(self) -> None:
        """Count one request of TOKENS / 20 tokens."""
        self._prompt.inc(9)
        self._first.observe(0.2)
        self._generated.inc(TOKENS // 20)
        self._joules.labels("prefill").inc(2)
        self._joules.labels("decode").inc(TOKENS // 20)


def start_node_exporter(directory: Path, port: int) -> subprocess.Popen[bytes] | None:
    if NODE_EXPORTER is None:
        return None
    return subprocess.Popen(
        [
            NODE_EXPORTER,
            "--collector.disable-defaults",
            "--collector.textfile",
            f"--collector.textfile.directory={directory}",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def test_prometheus_scrapes_the_board(machine: Machine) -> None:
    up = machine.prometheus.query("up")
    assert up and all(series["value"][1] == "1" for series in up)
    assert machine.prometheus.value("count(jetson_temperature_celsius)") == 8


def test_a_throttle_event_fires_its_alert_and_no_other(machine: Machine) -> None:
    firing = machine.prometheus.firing()
    assert set(firing) == {"JetsonUnderVoltage"}
    assert "the supply voltage dropped" in firing["JetsonUnderVoltage"]


def test_the_alert_is_silent_before_the_event(machine: Machine) -> None:
    before = machine.run.started - 2
    expression = 'increase(jetson_throttle_events_total{reason="under_voltage"}[5m]) > 0'
    assert machine.prometheus.query(expression, at=before) == []


def test_joules_of_a_token_in_promql_are_those_of_the_record(machine: Machine) -> None:
    """The exporter's counter over the timed region, as PromQL sees it, against our own samples."""
    run = machine.run
    assert run.ended
    seconds = run.ended - run.started
    recorded = machine.record["joules_per_token"]
    counter = 'jetson_energy_joules_total{rail="module"}'
    difference = f"({counter} - {counter} offset {round(seconds * 1000)}ms) / {TOKENS}"
    promql = machine.prometheus.value(difference, at=run.ended)
    assert promql
    print(f"J/token: record {recorded:.4f}, PromQL {promql / recorded - 1:+.2%}")
    assert promql == pytest.approx(recorded, rel=0.02)


def test_the_record_reaches_prometheus_through_the_textfile(machine: Machine) -> None:
    if not NODE_EXPORTER:
        pytest.skip("prometheus-node-exporter is not installed")
    query = 'run:orinbench_joules_per_token:last{test="tg400"}'
    found = until(lambda: machine.prometheus.value(query))
    assert found == pytest.approx(machine.record["joules_per_token"])
    started = machine.prometheus.value("orinbench_run_started_seconds")
    assert started == pytest.approx(machine.run.started)


QUERIES = {
    (name, panel.title, expression.replace("$instance", ".*").replace("$host", ".*"))
    for name, dashboard in DASHBOARDS["DASHBOARDS"].items()
    for panel in dashboard.panels
    for expression, _ in panel.queries
}


def test_every_query_of_every_dashboard_has_an_answer(machine: Machine) -> None:
    """On this board: nothing is misspelt, and nothing asks for what nobody exports."""
    empty = []
    for dashboard, panel, expression in sorted(QUERIES):
        if "orinbench" in expression and not NODE_EXPORTER:
            machine.prometheus.query(expression)  # it must be valid at least
        elif not until(partial(machine.prometheus.query, expression), 5.0):
            empty.append((dashboard, panel, expression))
    assert empty == [] and len(QUERIES) >= 40


def test_every_variable_of_every_dashboard_has_values(machine: Machine) -> None:
    for dashboard in DASHBOARDS["DASHBOARDS"].values():
        if "orinbench" in dashboard.instances and not NODE_EXPORTER:
            continue
        assert machine.prometheus.query(f"count by (instance) ({dashboard.instances})")


def test_every_rule_is_evaluated_without_error(machine: Machine) -> None:
    groups = answer(machine.prometheus.url, "rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) == 35
    assert [rule["name"] for rule in rules if rule["health"] != "ok"] == []


def test_the_demonstration_shows_a_board() -> None:
    """`make telemetry-demo`, on the ports that the page names but for Prometheus' own."""
    port = free_port()
    make = ["make", "--assume-old=.venv/.bench", f"BIN={Path(sys.executable).parent}"]
    command = [*make, "telemetry-demo", f"DEMO_PORT={port}"]
    process = subprocess.Popen(command, cwd=TELEMETRY.parent, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}"

        def found(path: str, **parameters: str) -> Any:
            with contextlib.suppress(OSError):
                return answer(url, path, **parameters)

        query = partial(found, "query", query="jetson_module_power_watts > 5")
        assert until(lambda: (query() or {}).get("result"), 90)
        assert len(found("rules")["groups"]) > 1 and process.poll() is None
    finally:
        os.killpg(process.pid, signal.SIGINT)
        process.wait(60)
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen("http://127.0.0.1:9401/healthz", timeout=5)
