"""Records of a board with every sensor, and of one with none."""

import copy
import re
from dataclasses import replace
from typing import Any

import pytest
from tests.benchmarks.orinbench_command import Build

from orinbench.judge.make_records import make_records
from orinbench.judge.schema import Record
from orinbench.measure.plan import Case
from orinbench.show.html_page import render_run

TG, PP = Case(0, 128, 0), Case(512, 0, 0)

# Drawing takes seconds: what several tests look at is drawn once.
_pages: dict[str, str] = {}


def figures_of(page: str) -> list[str]:
    return re.findall(r"<figure.*?</figure>", page, re.S)


@pytest.fixture
def plain_records(recorded_run: Build) -> list[Record]:
    """Two backends, two tests, eight rounds, and nothing that a sensor tells."""
    wobble = (0.0, 0.02, -0.02, 0.01, -0.01, 0.03, 0.0, -0.03)
    lanes = {
        name: {TG: [base * (1 + w) for w in wobble], PP: [base * (2 - w) for w in wobble]}
        for name, base in (("tinygrad:CPU", 80.0), ("llama.cpp", 150.0))
    }
    return make_records(recorded_run(lanes, 8))


@pytest.fixture
def rich_records(plain_records: list[Record]) -> list[Record]:
    """The same as a Jetson would have recorded it: energy, clocks, temperatures, warnings."""
    records: list[Record] = copy.deepcopy(plain_records)
    for place, record in enumerate(records):
        known: dict[str, Any] = {
            "device": "NV",
            "device_name": "Orin (nvgpu)",
            "joules_per_token": 0.1 * (place + 1),
            "tokens_per_joule": 10 / (place + 1),
            "energy": [
                {
                    "summed": ["VDD_GPU_SOC"],
                    "samples": 3 + 4 * place,
                    "ended": 100.0 + 5 * n + place,
                }
                for n in range(8)
            ],
            "clocks": [{"before": {}, "after": {"gpu_mhz": None, "cpu_khz": 2201600}}] * 8,
            "board_after": [
                {
                    "gpus": [{"name": "gpu", "current_hz": 1300500000}],
                    "zones": [
                        {"name": "cpu", "celsius": 60.0},
                        {"name": "tj", "celsius": 50.0 + n},
                    ],
                    "module_watts": 30.0 + n,
                    "power_mode": {"id": 0, "name": "MAXN"},
                }
                for n in range(8)
            ],
            "warnings": [{"kind": "drift", "text": "it drifted", "detail": "+3 %"}],
        }
        environment = record.environment | {"board": "Jetson AGX Orin"}
        records[place] = replace(record, **known, environment=environment)
    records[0].decode_path, records[0].n_ubatch = "fused", 512
    return records


@pytest.fixture
def rich_page(rich_records: list[Record]) -> str:
    """The page of `rich_records`."""
    if "rich" not in _pages:
        _pages["rich"] = render_run(rich_records)
    return _pages["rich"]


@pytest.fixture
def plain_page(plain_records: list[Record]) -> str:
    """The page of `plain_records`, cut short and synthetic."""
    if "plain" not in _pages:
        short = [replace(record, partial=True, synthetic=True) for record in plain_records]
        _pages["plain"] = render_run(short)
    return _pages["plain"]
