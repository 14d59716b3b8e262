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
INSTANCE = 'instance=~"$instance"'
#: Grafana's grid is 24 wide.
WIDTH = 24


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
        steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
        steps += [{"color": colour, "value": value} for value, colour in self.thresholds]
        defaults: dict[str, Any] = {"unit": self.unit}
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
        defaults |= {key: v for key, v in (("min", low), ("max", high)) if v is not None}
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


@dataclass(frozen=True)
class Dashboard:
    """One dashboard; `instances` is the metric whose `instance` label the reader may choose."""

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
                    {
                        "name": "instance",
                        "type": "query",
                        "datasource": DATASOURCE,
                        "query": f"label_values({self.instances}, instance)",
                        "refresh": 2,
                        "multi": True,
                        "includeAll": True,
                        "allValue": ".*",
                        "current": {"text": "All", "value": "$__all"},
                    },
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
    """One number."""
    return Panel(title, unit, [(query, "")], kind="stat", width=4, height=4, **more)


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
            thresholds=[(1, "red")],
        ),
        stat("Multiprocessors on", "none", f"jetson_gpu_multiprocessors{{{INSTANCE}}}"),
        Panel(
            "Power by rail",
            "watt",
            [
                (f"jetson_rail_power_watts{{{INSTANCE}}}", "{{rail}}"),
                (f"jetson_module_power_watts{{{INSTANCE}}}", "module"),
            ],
            width=12,
            description="VDDQ_VDD2_1V8AO is fed from inside the module and is not in its sum.",
        ),
        Panel(
            "Temperature",
            "celsius",
            [
                (f"jetson_temperature_celsius{{{INSTANCE}}}", "{{zone}}"),
                (
                    f'jetson_temperature_trip_celsius{{{INSTANCE}, zone="tj", type="passive"}}',
                    "trip",
                ),
            ],
            width=12,
            description="A gated zone has no value.",
        ),
        Panel(
            "GPU",
            "percentunit",
            [(f"jetson_gpu_load_ratio{{{INSTANCE}}}", "load of GPU {{gpu}}")],
            limits=(0, 1),
        ),
        Panel(
            "GPU clock",
            "hertz",
            [
                (f"jetson_gpu_frequency_hertz{{{INSTANCE}}}", "clock"),
                (f"jetson_gpu_max_frequency_hertz{{{INSTANCE}}}", "may reach"),
            ],
        ),
        Panel(
            "Throttle events a second",
            "none",
            [
                (f"rate(jetson_throttle_events_total{{{INSTANCE}}}[1m])", "{{reason}}"),
                (
                    f'jetson_cooling_state_ratio{{{INSTANCE}, type=~".*-alert"}}',
                    "{{type}}",
                ),
            ],
        ),
        Panel(
            "Mean power from energy",
            "watt",
            [(f"rail:jetson_power_watts:rate1m{{{INSTANCE}}}", "{{rail}}")],
        ),
        Panel(
            "GPU memory",
            "bytes",
            [
                (f"jetson_nvmap_memory_bytes{{{INSTANCE}}}", "allocated"),
                (f"jetson_memory_largest_free_block_bytes{{{INSTANCE}}}", "largest free block"),
            ],
        ),
        Panel(
            "Fan",
            "rotrpm",
            [(f"jetson_fan_speed_rpm{{{INSTANCE}}}", "{{fan}}")],
        ),
        Panel(
            "Power mode",
            "none",
            [(f"jetson_power_mode_info{{{INSTANCE}}}", "{{id}} {{name}}")],
            kind="table",
        ),
        Panel(
            "Clocks pinned",
            "bool_yes_no",
            [(f"jetson_clocks_pinned{{{INSTANCE}}}", "{{domain}}")],
            kind="stat",
        ),
        Panel(
            "Sources",
            "bool_yes_no",
            [(f"jetson_scrape_source_success{{{INSTANCE}}}", "{{source}}")],
            kind="stat",
        ),
    ],
)

LLM = Dashboard(
    "jetson-llm",
    "LLM server",
    "llm_requests_in_progress",
    [
        stat(
            "Tokens a second",
            "none",
            f"sum by (instance) (rate(llm_generated_tokens_total{{{INSTANCE}}}[1m]))",
        ),
        stat("Joules a token", "joule", "host:llm_joules_per_token:rate5m"),
        stat("Under way", "none", f"llm_requests_in_progress{{{INSTANCE}}}"),
        stat("Waiting", "none", f"llm_requests_waiting{{{INSTANCE}}}"),
        stat(
            "First token, median",
            "s",
            "histogram_quantile(0.5, sum by (instance, le) "
            f"(rate(llm_time_to_first_token_seconds_bucket{{{INSTANCE}}}[5m])))",
        ),
        stat(
            "First token, 95 %",
            "s",
            "histogram_quantile(0.95, sum by (instance, le) "
            f"(rate(llm_time_to_first_token_seconds_bucket{{{INSTANCE}}}[5m])))",
        ),
        Panel(
            "Tokens a second",
            "none",
            [
                (f"rate(llm_generated_tokens_total{{{INSTANCE}}}[1m])", "generated"),
                (f"rate(llm_prompt_tokens_total{{{INSTANCE}}}[1m])", "prompt"),
            ],
            width=12,
        ),
        Panel(
            "Requests a second",
            "reqps",
            [(f"rate(llm_requests_total{{{INSTANCE}}}[1m])", "{{status}}")],
            width=12,
        ),
        Panel(
            "Time to first token",
            "s",
            [
                (
                    f"histogram_quantile({quantile}, sum by (instance, le) "
                    f"(rate(llm_time_to_first_token_seconds_bucket{{{INSTANCE}}}[5m])))",
                    legend,
                )
                for quantile, legend in ((0.5, "median"), (0.95, "95 %"))
            ],
        ),
        Panel(
            "Time of a request",
            "s",
            [
                (
                    f"histogram_quantile({quantile}, sum by (instance, le) "
                    f"(rate(llm_request_duration_seconds_bucket{{{INSTANCE}}}[5m])))",
                    legend,
                )
                for quantile, legend in ((0.5, "median"), (0.95, "95 %"))
            ],
        ),
        Panel(
            "Module power meanwhile",
            "watt",
            [("jetson_module_power_watts", "{{instance}}")],
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
            [(f"orinbench_tokens_per_second{{{INSTANCE}}}", "{{model}} {{test}} {{backend}}")],
            width=12,
            description="Median tokens a second of the newest run, written by --textfile.",
        ),
        Panel(
            "Energy of a token",
            "joule",
            [
                (f"orinbench_joules_per_token{{{INSTANCE}}}", "{{model}} {{test}} {{backend}}"),
                (
                    f"run:orinbench_joules_per_token:last{{{INSTANCE}}}",
                    "last region, {{test}} {{backend}}",
                ),
            ],
            width=12,
        ),
        Panel(
            "Share of what memory bandwidth allows",
            "percent",
            [(f"orinbench_roofline_percent{{{INSTANCE}}}", "{{model}} {{test}} {{backend}}")],
            limits=(0, 100),
        ),
        Panel(
            "Time to first token",
            "s",
            [(f"orinbench_ttft_seconds{{{INSTANCE}}}", "{{model}} {{test}} {{backend}}")],
        ),
        Panel(
            "Tokens a joule",
            "none",
            [(f"orinbench_tokens_per_joule{{{INSTANCE}}}", "{{model}} {{test}} {{backend}}")],
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
        expression.replace("$instance", ".*")
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
