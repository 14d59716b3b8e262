#!/usr/bin/env python3
"""Write the Grafana dashboards beside this file, or `--check` that they are what this says."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
#: Chosen in Grafana, so that one dashboard serves any Prometheus and any number of boards.
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
INSTANCE = 'instance=~"$instance", host=~"$host"'
CHOSEN = f"{{{INSTANCE}}}"
#: Ends a legend: of two machines, each series says which it is from.
ONE = "{{instance}}"
#: A row of a benchmark.
ROW = f"{{{{backend}}}} {{{{test}}}} {{{{model}}}} {ONE}"
#: Grafana's grid is 24 wide.
WIDTH = 24
#: The pages' dark colours (benchmarks/orinbench/show/report.css), as Grafana opens dark.
BLUE, ORANGE, GREEN, YELLOW, PALE = "#5eb3ea", "#ff9552", "#4fcfa4", "#d9b44a", "#9cc4de"
GOOD, BAD, MUTED = "#5fd3ad", "#ff8f85", "#a3adb9"
#: Grafana's own text colour, dark or light.
INK = "text"
#: Power and temperature have the colours of the exporter's page; load and the rest are BLUE.
COLOURS = {"watt": ORANGE, "joule": ORANGE, "celsius": BAD}
#: A part's colour on every board, by rail, zone or alert; of two that match, the latter holds.
PARTS = {
    "module": ORANGE,
    "tj|hot": BAD,
    "cv|tboard|tdiode|vddr?q": PALE,
    "soc|sys": YELLOW,
    "cpu": GREEN,
    "gpu": BLUE,
}
#: Names of several numbers in pixels: Grafana would shrink them to the longest.
STAT = {"graphMode": "none", "text": {"titleSize": 12}}
BACKENDS = {"tinygrad": BLUE, "llama": ORANGE}


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
    #: Of a stat: colour from each value on, in rising order; None is the least.
    thresholds: Sequence[tuple[float | None, str]] = ((None, INK),)
    #: Colours by a pattern that the first word of a legend has; `mode` as of `colour_setting`.
    colours: Mapping[str, str] = field(default_factory=dict)
    mode: str = "fixed"
    #: Headings of a table's columns by their label (or `Value`), from left to right.
    columns: Mapping[str, str] = field(default_factory=dict)

    def _defaults(self) -> dict[str, Any]:
        """Settings of each of the series."""
        low, high = self.limits
        defaults: dict[str, Any] = {"unit": self.unit}
        defaults |= {key: v for key, v in (("min", low), ("max", high)) if v is not None}
        if self.kind == "timeseries":
            defaults["color"] = colour_setting("shades", COLOURS.get(self.unit, BLUE))
            defaults["custom"] = {"lineWidth": 2, "showPoints": "never", "axisSoftMin": 0}
        if self.kind == "stat":
            steps = [{"color": colour, "value": value} for value, colour in self.thresholds]
            defaults["thresholds"] = {"mode": "absolute", "steps": steps}
        return defaults

    def _overrides(self) -> list[dict[str, Any]]:
        return [
            {
                "matcher": {"id": "byRegexp", "options": f"/^\\S*({pattern})/i"},
                "properties": [{"id": "color", "value": colour_setting(self.mode, colour)}],
            }
            for pattern, colour in self.colours.items()
        ]

    def _transformations(self) -> list[dict[str, Any]]:
        """Choose and order the columns; Grafana would show all labels and the metric too."""
        if not self.columns:
            return []
        order = {label: place for place, label in enumerate(self.columns)}
        return [
            {"id": "filterFieldsByName", "options": {"include": {"names": list(self.columns)}}},
            {
                "id": "organize",
                "options": {"indexByName": order, "renameByName": dict(self.columns)},
            },
        ]

    def json_object(self, number: int, x: int, y: int) -> dict[str, Any]:
        """The panel at its place in the grid."""
        instant = self.kind == "table"
        return {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.description,
            "datasource": DATASOURCE,
            "gridPos": {"x": x, "y": y, "w": self.width, "h": self.height},
            "fieldConfig": {"defaults": self._defaults(), "overrides": self._overrides()},
            "options": STAT if self.kind == "stat" else {},
            "transformations": self._transformations(),
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


def colour_setting(mode: str, colour: str) -> dict[str, str]:
    """`colour` ("fixed"), or its shades ("shades"), a shade for each series."""
    return {"mode": mode, "fixedColor": colour}


def template_variable(name: str, query: str) -> dict[str, Any]:
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

    def json_text(self) -> str:
        """The content of the file that Grafana provisions it from."""
        content = {
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
                    template_variable("host", f"label_values({self.instances}, host)"),
                    template_variable(
                        "instance", f'label_values({self.instances}{{host=~"$host"}}, instance)'
                    ),
                ]
            },
            "panels": list(self._panels_on_grid()),
        }
        return json.dumps(content, indent=1, ensure_ascii=False) + "\n"

    def _panels_on_grid(self) -> Iterator[dict[str, Any]]:
        x = y = height = 0
        for number, panel in enumerate(self.panels, 1):
            if x + panel.width > WIDTH:
                x, y, height = 0, y + height, 0
            yield panel.json_object(number, x, y)
            x, height = x + panel.width, max(height, panel.height)


def stat_panel(title: str, unit: str, query: str, **more: Any) -> Panel:
    """One number a machine."""
    return Panel(title, unit, [(query, ONE)], kind="stat", width=4, height=4, **more)


BOARD = Dashboard(
    "jetson-board",
    "Jetson board",
    "jetson_scrape_source_success",
    [
        stat_panel("Module power", "watt", f"jetson_module_power_watts{CHOSEN}"),
        stat_panel("GPU load", "percentunit", f"jetson_gpu_load_ratio{CHOSEN}", limits=(0, 1)),
        stat_panel("GPU clock", "hertz", f"jetson_gpu_frequency_hertz{CHOSEN}"),
        stat_panel(
            "Below the thermal trip",
            "celsius",
            f"instance:jetson_thermal_headroom_celsius:min{CHOSEN}",
            # As the alert JetsonNearThermalTrip.
            thresholds=[(None, BAD), (5, INK)],
        ),
        stat_panel(
            "Throttle events, 5 min",
            "none",
            f"sum by (instance) (reason:jetson_throttle_events:increase5m{CHOSEN})",
            thresholds=[(None, INK), (1, BAD)],
        ),
        stat_panel("Multiprocessors on", "none", f"jetson_gpu_multiprocessors{CHOSEN}"),
        Panel(
            "Power by rail",
            "watt",
            [
                (f"jetson_rail_power_watts{CHOSEN}", f"{{{{rail}}}} {ONE}"),
                (f"jetson_module_power_watts{CHOSEN}", f"module {ONE}"),
            ],
            width=12,
            colours=PARTS,
            description="VDDQ_VDD2_1V8AO is fed from inside the module and is not in its sum.",
        ),
        Panel(
            "Temperature",
            "celsius",
            [
                (f"jetson_temperature_celsius{CHOSEN}", f"{{{{zone}}}} {ONE}"),
                (
                    "min by (instance) "
                    f'(jetson_temperature_trip_celsius{{{INSTANCE}, type="passive"}})',
                    f"first trip {ONE}",
                ),
            ],
            width=12,
            colours=PARTS | {"first": MUTED},
            description="A gated zone has no value.",
        ),
        Panel(
            "GPU load",
            "percentunit",
            [(f"jetson_gpu_load_ratio{CHOSEN}", f"load of GPU {{{{gpu}}}} {ONE}")],
            limits=(0, 1),
        ),
        Panel(
            "GPU clock",
            "hertz",
            [
                (f"jetson_gpu_frequency_hertz{CHOSEN}", f"clock {ONE}"),
                (f"jetson_gpu_max_frequency_hertz{CHOSEN}", f"may reach {ONE}"),
            ],
            colours={"may": MUTED},
        ),
        Panel(
            "Throttle events a second",
            "none",
            [(f"rate(jetson_throttle_events_total{CHOSEN}[1m])", f"{{{{reason}}}} {ONE}")],
            colours={"average": YELLOW, "instantaneous": ORANGE, "under": BAD},
        ),
        Panel(
            "Throttle alerts of the chip",
            "percentunit",
            [
                (
                    f'jetson_cooling_state_ratio{{{INSTANCE}, type=~".*-alert"}}',
                    f"{{{{type}}}} {ONE}",
                )
            ],
            width=6,
            limits=(0, 1),
            colours=PARTS,
        ),
        Panel(
            "Mean power from energy",
            "watt",
            [(f"rail:jetson_power_watts:rate1m{CHOSEN}", f"{{{{rail}}}} {ONE}")],
            width=12,
            colours=PARTS,
        ),
        Panel(
            "GPU memory",
            "bytes",
            [
                (f"jetson_nvmap_memory_bytes{CHOSEN}", f"allocated {ONE}"),
                (
                    f"jetson_memory_largest_free_block_bytes{CHOSEN}",
                    f"largest free block {ONE}",
                ),
            ],
            width=6,
            colours={"largest": ORANGE},
        ),
        Panel(
            "Fan",
            "rotrpm",
            [(f"jetson_fan_speed_rpm{CHOSEN}", f"{{{{fan}}}} {ONE}")],
        ),
        Panel(
            "Power mode",
            "none",
            [(f"jetson_power_mode_info{CHOSEN}", "")],
            kind="table",
            columns={"instance": "board", "id": "number", "name": "mode"},
        ),
        Panel(
            "Clocks pinned",
            "bool_yes_no",
            [(f"jetson_clocks_pinned{CHOSEN}", f"{{{{domain}}}} {ONE}")],
            kind="stat",
        ),
        Panel(
            "Sources",
            "bool_yes_no",
            [(f"jetson_scrape_source_success{CHOSEN}", f"{{{{source}}}} {ONE}")],
            kind="stat",
            width=WIDTH,
            height=5,
            thresholds=[(None, BAD), (1, GOOD)],
        ),
    ],
)

#: Has a host or an instance, never both.
JOULES = 'host:llm_joules_per_token:rate5m{host=~"$host"}'

LLM = Dashboard(
    "jetson-llm",
    "LLM server",
    "llm:requests_running",
    [
        stat_panel("Tokens a second", "tok/s", f"llm:generated_tokens:rate1m{CHOSEN}"),
        stat_panel("Joules a token", "joule", JOULES),
        stat_panel("Under way", "none", f"llm:requests_running{CHOSEN}"),
        stat_panel("Waiting", "none", f"llm:requests_waiting{CHOSEN}"),
        stat_panel("First token, median", "s", f"llm:time_to_first_token_seconds:p50_5m{CHOSEN}"),
        stat_panel("First token, 95 %", "s", f"llm:time_to_first_token_seconds:p95_5m{CHOSEN}"),
        Panel(
            "Joules a token",
            "joule",
            [(JOULES, "{{host}}{{instance}}")],
            width=12,
            description="The module, without carrier board and power supply; idle time included.",
        ),
        Panel(
            "Joules a token, by phase",
            "joule",
            [(f"phase:llm_joules_per_token:rate5m{CHOSEN}", f"{{{{phase}}}} {ONE}")],
            width=12,
            description="The server's own meter, without idle time and cached tokens.",
        ),
        Panel(
            "Tokens a second",
            "tok/s",
            [
                (f"llm:generated_tokens:rate1m{CHOSEN}", f"generated {ONE}"),
                (f"llm:prompt_tokens:rate1m{CHOSEN}", f"prompt {ONE}"),
            ],
            colours={"prompt": ORANGE},
            width=12,
        ),
        Panel(
            "Requests",
            "none",
            [
                (f"llm:requests_running{CHOSEN}", f"under way {ONE}"),
                (f"llm:requests_waiting{CHOSEN}", f"waiting {ONE}"),
            ],
            colours={"waiting": ORANGE},
        ),
        Panel(
            "Time to first token",
            "s",
            [
                (f"llm:time_to_first_token_seconds:p50_5m{CHOSEN}", f"median {ONE}"),
                (f"llm:time_to_first_token_seconds:p95_5m{CHOSEN}", f"95 % {ONE}"),
            ],
            colours={"95": ORANGE},
        ),
        Panel(
            "Module power meanwhile", "watt", [('jetson_module_power_watts{host=~"$host"}', ONE)]
        ),
    ],
)

HISTORY = Dashboard(
    "orinbench-history",
    "Benchmark history",
    "orinbench_tokens_per_second",
    [
        Panel(
            "Throughput",
            "tok/s",
            [(f"orinbench_tokens_per_second{CHOSEN}", ROW)],
            width=12,
            colours=BACKENDS,
            mode="shades",
            description="Median tokens a second of the newest run, written by --textfile.",
        ),
        Panel(
            "Energy of a token",
            "joule",
            [
                (f"orinbench_joules_per_token{CHOSEN}", ROW),
                (
                    f"run:orinbench_joules_per_token:last{CHOSEN}",
                    f"{{{{backend}}}} {{{{test}}}} last region {ONE}",
                ),
            ],
            width=12,
            colours=BACKENDS,
            mode="shades",
        ),
        Panel(
            "Share of the roofline",
            "percent",
            [(f"orinbench_roofline_percent{CHOSEN}", ROW)],
            limits=(0, 100),
            colours=BACKENDS,
            mode="shades",
        ),
        Panel(
            "Time to first token",
            "s",
            [(f"orinbench_ttft_seconds{CHOSEN}", ROW)],
            colours=BACKENDS,
            mode="shades",
        ),
        Panel(
            "Tokens a joule",
            "none",
            [(f"orinbench_tokens_per_joule{CHOSEN}", ROW)],
            colours=BACKENDS,
            mode="shades",
        ),
        Panel(
            "Age of the figures",
            "s",
            [(f"time() - orinbench_written_seconds{CHOSEN}", "{{instance}}")],
            kind="stat",
        ),
        Panel(
            "Newest figures",
            "none",
            [(f"orinbench_tokens_per_second{CHOSEN}", "")],
            kind="table",
            width=16,
            columns={
                "instance": "board",
                "backend": "backend",
                "model": "model",
                "test": "test",
                "Value": "tok/s",
            },
        ),
    ],
    refresh="1m",
    span="now-7d",
)

DASHBOARDS = {"board.json": BOARD, "llm.json": LLM, "history.json": HISTORY}


def main(arguments: Sequence[str]) -> int:
    """Write or check; returns the exit code."""
    if arguments not in ([], ["--check"]):
        print("build.py: the only argument is --check", file=sys.stderr)
        return 2
    stale = [
        name
        for name, dashboard in DASHBOARDS.items()
        if not (HERE / name).exists() or (HERE / name).read_text() != dashboard.json_text()
    ]
    if arguments and stale:
        print(f"build.py: stale: {', '.join(stale)}; run {sys.argv[0]}", file=sys.stderr)
        return 1
    for name in stale:
        (HERE / name).write_text(DASHBOARDS[name].json_text())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
