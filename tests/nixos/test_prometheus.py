"""Prometheus' configuration as the host has it, and its rule files, before promtool."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.nixos.recorded import recorded

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def prometheus() -> dict[str, Any]:
    """NixOS's configuration from the module's options."""
    config: dict[str, Any] = json.loads(recorded()["prometheus.json"])
    return config


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool: apt-get install prometheus")
def test_promtool_takes_the_configuration(prometheus: dict[str, Any], tmp_path: Path) -> None:
    rules = ROOT / "telemetry" / "rules"
    config = prometheus | {"rule_files": [str(rules / n) for n in prometheus["rule_files"]]}
    path = tmp_path / "prometheus.yml"
    path.write_text(json.dumps(config))  # JSON is YAML
    result = subprocess.run(
        ["promtool", "check", "config", str(path)], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "rules found" in result.stdout


def test_every_rule_file_is_used(prometheus: dict[str, Any]) -> None:
    there = {path.name for path in (ROOT / "telemetry" / "rules").glob("*.yml")}
    assert set(prometheus["rule_files"]) == there


def test_all_that_runs_is_scraped_and_on_the_loopback(prometheus: dict[str, Any]) -> None:
    jobs = {
        job["job_name"]: [c["targets"] for c in job["static_configs"]]
        for job in prometheus["scrape_configs"]
    }
    # One target a job: all have the host as their instance, and two would share one `up`.
    assert jobs == {
        "jetson": [["127.0.0.1:9401"]],
        "jetson-debugfs": [["127.0.0.1:9402"]],
        "llm-main": [["127.0.0.1:8000"]],
        "node": [["127.0.0.1:9100"]],
        "prometheus": [["127.0.0.1:9090"]],
    }
    assert "--web.listen-address=127.0.0.1:9090" in recorded()["prometheus.service"]
