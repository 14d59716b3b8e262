#!/usr/bin/env python3
"""Write the Grafana dashboards beside this file, or `--check` that they are what this says."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
#: Chosen in Grafana, so that one dashboard serves any Prometheus and any number of boards.
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
INSTANCE = 'instance=~"$instance", host=~"$host"'
#: Metrics with one series a machine: of two machines, each says which it is.
ONE = "{{instance}}"
#: A row of a benchmark.
ROW = f"{ONE} {{{{model}}}} {{{{test}}}} {{{{backend}}}}"
#: Grafana's grid is 24 wide.
WIDTH = 24
#: The pages' dark colours (benchmarks/orinbench/report/report.css), as Grafana opens dark: power,
#: load and temperature as on the exporter's page.
COLOURS = {
    **dict.fromkeys(("watt", "joule"), "#ff9552"),
    **dict.fromkeys(("percentunit", "hertz"), "#5eb3ea"),
    "celsius": "#ff8f85",
}
GOOD, BAD = "#5fd3ad", "#ff8f85"


@dataclass(frozen=True)
class Panel:
    """One panel: queries with their legends, in `unit`; `kind` is Grafana's panel type."""

    title: str
    unit: str
    queries: Sequence[tuple[str, str]]
    kind: str = "timeseries"
    width: int = 8
    height: int = 8
    description: str = ""
    limits: tuple[float | None, float | None] = (None, None)
    #: Value and colour from which on it holds, in rising order.
    thresholds: Sequence[tuple[float, str]] = ()

    def json(self, number: int, x: int, y: int) -> dict[str, Any]:
        """The panel at its place in the grid."""
        low, high = self.limits
        steps: list[dict[str, Any]] = [{"color": GOOD, "value": None}]
        steps += [{"color": colour, "value": value} for value, colour in self.thresholds]
        defaults: dict[str, Any] = {"unit": self.unit}
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
        defaults |= {key: v for key, v in (("min", low), ("max", high)) if v is not None}
        if colour := COLOURS.get(self.unit):
            mode = "shades" if self.kind == "timeseries" else "fixed"
            defaults["color"] = {"mode": mode, "fixedColor": colour}
        if self.kind == "timeseries":
            defaults["custom"] = {"fillOpacity": 8, "showPoints": "never", "spanNulls": False}
        instant = self.kind == "table"
        return {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.description,
            "datasource": DATASOURCE,
            "gridPos": {"x": x, "y": y, "w": self.width, "h": self.height},
            "fieldConfig": {"defaults": defaults, "overrides": []},
            "targets": [
                {
                    "refId": chr(ord("A") + index),
                    "datasource": DATASOURCE,
                    "expr": expression,
                    "legendFormat": legend,
                    "instant": instant,
                    "range": not instant,
                    "format": "table" if instant else "time_series",
                }
                for index, (expression, legend) in enumerate(self.queries)
            ],
        }


def variable(name: str, query: str) -> dict[str, Any]:
    """A choice of some or all of a label's values; all holds for series without the label too."""
    return {
        "name": name,
        "type": "query",
        "datasource": DATASOURCE,
        "query": query,
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


@dataclass(frozen=True)
class Dashboard:
    """One dashboard; the reader chooses among `host` and `instance` of the metric `instances`."""

    uid: str
    title: str
    instances: str
    panels: Sequence[Panel]
    refresh: str = "5s"
    span: str = "now-30m"
    tags: Sequence[str] = field(default=("tinygrad-orin",))

    def json(self) -> dict[str, Any]:
        """The dashboard as Grafana provisions it."""
        return {
            "uid": self.uid,
            "title": self.title,
            "tags": list(self.tags),
            "schemaVersion": 39,
            "editable": False,
            "timezone": "browser",
            "refresh": self.refresh,
            "time": {"from": self.span, "to": "now"},
            "templating": {
                "list": [
                    {"name": "datasource", "type": "datasource", "query": "prometheus"},
                    variable("host", f"label_values({self.instances}, host)"),
                    variable(
                        "instance", f'label_values({self.instances}{{host=~"$host"}}, instance)'
                    ),
                ]
            },
            "panels": list(self._placed()),
        }

    def _placed(self) -> Iterator[dict[str, Any]]:
        x = y = height = 0
        for number, panel in enumerate(self.panels, 1):
            if x + panel.width > WIDTH:
                x, y, height = 0, y + height, 0
            yield panel.json(number, x, y)
            x, height = x + panel.width, max(height, panel.height)


def stat(title: str, unit: str, query: str, **more: Any) -> Panel:
    """One number a machine."""
    return Panel(title, unit, [(query, ONE)], kind="stat", width=4, height=4, **more)


BOARD = Dashboard(
    "jetson-board",
    "Jetson board",
    "jetson_scrape_source_success",
    [
        stat("Module power", "watt", f"jetson_module_power_watts{{{INSTANCE}}}"),
        stat("GPU load", "percentunit", f"jetson_gpu_load_ratio{{{INSTANCE}}}", limits=(0, 1)),
        stat("GPU clock", "hertz", f"jetson_gpu_frequency_hertz{{{INSTANCE}}}"),
        stat(
            "Below the thermal trip",
            "celsius",
            f"instance:jetson_thermal_headroom_celsius:min{{{INSTANCE}}}",
        ),
        stat(
            "Throttle events, 5 min",
            "none",
            f"sum by (instance) (reason:jetson_throttle_events:increase5m{{{INSTANCE}}})",
            thresholds=[(1, BAD)],
        ),
        stat("Multiprocessors on", "none", f"jetson_gpu_multiprocessors{{{INSTANCE}}}"),
        Panel(
            "Power by rail",
            "watt",
            [
                (f"jetson_rail_power_watts{{{INSTANCE}}}", f"{ONE} {{{{rail}}}}"),
                (f"jetson_module_power_watts{{{INSTANCE}}}", f"{ONE} module"),
            ],
            width=12,
            description="VDDQ_VDD2_1V8AO is fed from inside the module and is not in its sum.",
        ),
        Panel(
            "Temperature",
            "celsius",
            [
                (f"jetson_temperature_celsius{{{INSTANCE}}}", f"{ONE} {{{{zone}}}}"),
                (
                    "min by (instance) "
                    f'(jetson_temperature_trip_celsius{{{INSTANCE}, type="passive"}})',
                    f"{ONE} first trip",
                ),
            ],
            width=12,
            description="A gated zone has no value.",
        ),
        Panel(
            "GPU load",
            "percentunit",
            [(f"jetson_gpu_load_ratio{{{INSTANCE}}}", f"{ONE} load of GPU {{{{gpu}}}}")],
            limits=(0, 1),
        ),
        Panel(
            "GPU clock",
            "hertz",
            [
                (f"jetson_gpu_frequency_hertz{{{INSTANCE}}}", f"{ONE} clock"),
                (f"jetson_gpu_max_frequency_hertz{{{INSTANCE}}}", f"{ONE} may reach"),
            ],
        ),
        Panel(
            "Throttle events a second",
            "none",
            [(f"rate(jetson_throttle_events_total{{{INSTANCE}}}[1m])", f"{ONE} {{{{reason}}}}")],
        ),
        Panel(
            "Throttle alerts of the chip",
            "percentunit",
            [
                (
                    f'jetson_cooling_state_ratio{{{INSTANCE}, type=~".*-alert"}}',
                    f"{ONE} {{{{type}}}}",
                )
            ],
            limits=(0, 1),
        ),
        Panel(
            "Mean power from energy",
            "watt",
            [(f"rail:jetson_power_watts:rate1m{{{INSTANCE}}}", f"{ONE} {{{{rail}}}}")],
        ),
        Panel(
            "GPU memory",
            "bytes",
            [
                (f"jetson_nvmap_memory_bytes{{{INSTANCE}}}", f"{ONE} allocated"),
                (
                    f"jetson_memory_largest_free_block_bytes{{{INSTANCE}}}",
                    f"{ONE} largest free block",
                ),
            ],
        ),
        Panel(
            "Fan",
            "rotrpm",
            [(f"jetson_fan_speed_rpm{{{INSTANCE}}}", f"{ONE} {{{{fan}}}}")],
        ),
        Panel(
            "Power mode",
            "none",
            [(f"jetson_power_mode_info{{{INSTANCE}}}", f"{ONE} {{{{id}}}} {{{{name}}}}")],
            kind="table",
        ),
        Panel(
            "Clocks pinned",
            "bool_yes_no",
            [(f"jetson_clocks_pinned{{{INSTANCE}}}", f"{ONE} {{{{domain}}}}")],
            kind="stat",
        ),
        Panel(
            "Sources",
            "bool_yes_no",
            [(f"jetson_scrape_source_success{{{INSTANCE}}}", f"{ONE} {{{{source}}}}")],
            kind="stat",
        ),
    ],
)

LLM = Dashboard(
    "jetson-llm",
    "LLM server",
    "llm:requests_running",
    [
        stat("Tokens a second", "none", f"llm:generated_tokens:rate1m{{{INSTANCE}}}"),
        stat("Joules a token", "joule", "host:llm_joules_per_token:rate5m"),
        stat("Under way", "none", f"llm:requests_running{{{INSTANCE}}}"),
        stat("Waiting", "none", f"llm:requests_waiting{{{INSTANCE}}}"),
        stat("First token, median", "s", f"llm:time_to_first_token_seconds:p50_5m{{{INSTANCE}}}"),
        stat("First token, 95 %", "s", f"llm:time_to_first_token_seconds:p95_5m{{{INSTANCE}}}"),
        Panel(
            "Joules a token",
            "joule",
            [("host:llm_joules_per_token:rate5m", "{{host}}{{instance}}")],
            width=12,
            description="The module's rails over the server's tokens, idle time included: module, "
            "without carrier board and power supply.",
        ),
        Panel(
            "Tokens a second",
            "none",
            [
                (f"llm:generated_tokens:rate1m{{{INSTANCE}}}", f"{ONE} generated"),
                (f"llm:prompt_tokens:rate1m{{{INSTANCE}}}", f"{ONE} prompt"),
            ],
            width=12,
        ),
        Panel(
            "Requests",
            "none",
            [
                (f"llm:requests_running{{{INSTANCE}}}", f"{ONE} under way"),
                (f"llm:requests_waiting{{{INSTANCE}}}", f"{ONE} waiting"),
            ],
        ),
        Panel(
            "Time to first token",
            "s",
            [
                (f"llm:time_to_first_token_seconds:p50_5m{{{INSTANCE}}}", f"{ONE} median"),
                (f"llm:time_to_first_token_seconds:p95_5m{{{INSTANCE}}}", f"{ONE} 95 %"),
            ],
        ),
        Panel(
            "Module power meanwhile",
            "watt",
            [('jetson_module_power_watts{host=~"$host"}', ONE)],
        ),
    ],
)

HISTORY = Dashboard(
    "orinbench-history",
    "Benchmark history",
    "orinbench_tokens_per_second",
    [
        Panel(
            "Speed",
            "none",
            [
                (
                    f"orinbench_tokens_per_second{{{INSTANCE}}}",
                    ROW,
                )
            ],
            width=12,
            description="Median tokens a second of the newest run, written by --textfile.",
        ),
        Panel(
            "Energy of a token",
            "joule",
            [
                (
                    f"orinbench_joules_per_token{{{INSTANCE}}}",
                    ROW,
                ),
                (
                    f"run:orinbench_joules_per_token:last{{{INSTANCE}}}",
                    f"{ONE} last region, {{{{test}}}} {{{{backend}}}}",
                ),
            ],
            width=12,
        ),
        Panel(
            "Share of what memory bandwidth allows",
            "percent",
            [
                (
                    f"orinbench_roofline_percent{{{INSTANCE}}}",
                    ROW,
                )
            ],
            limits=(0, 100),
        ),
        Panel(
            "Time to first token",
            "s",
            [
                (
                    f"orinbench_ttft_seconds{{{INSTANCE}}}",
                    ROW,
                )
            ],
        ),
        Panel(
            "Tokens a joule",
            "none",
            [
                (
                    f"orinbench_tokens_per_joule{{{INSTANCE}}}",
                    ROW,
                )
            ],
        ),
        Panel(
            "Age of the figures",
            "s",
            [(f"time() - orinbench_written_seconds{{{INSTANCE}}}", "{{instance}}")],
            kind="stat",
        ),
        Panel(
            "Newest figures",
            "none",
            [(f"orinbench_tokens_per_second{{{INSTANCE}}}", "")],
            kind="table",
            width=16,
        ),
    ],
    refresh="1m",
    span="now-7d",
)

DASHBOARDS = {"board.json": BOARD, "llm.json": LLM, "history.json": HISTORY}


def queries(dashboard: Dashboard) -> list[str]:
    """The dashboard's queries as Prometheus gets them once every instance is chosen."""
    return [
        expression.replace("$instance", ".*").replace("$host", ".*")
        for panel in dashboard.panels
        for expression, _ in panel.queries
    ]


def text(dashboard: Dashboard) -> str:
    """The file's content."""
    return json.dumps(dashboard.json(), indent=1, ensure_ascii=False) + "\n"


def main(arguments: Sequence[str]) -> int:
    """Write or check; returns the exit code."""
    if arguments not in ([], ["--check"]):
        print("build.py: the only argument is --check", file=sys.stderr)
        return 2
    stale = [
        name
        for name, dashboard in DASHBOARDS.items()
        if not (HERE / name).exists() or (HERE / name).read_text() != text(dashboard)
    ]
    if arguments and stale:
        print(f"build.py: stale: {', '.join(stale)}; run {sys.argv[0]}", file=sys.stderr)
        return 1
    for name in stale:
        (HERE / name).write_text(text(DASHBOARDS[name]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
