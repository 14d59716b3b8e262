"""Prometheus' configuration as the host has it, and its rule files, before promtool."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Flake = Callable[..., Any]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def prometheus(flake: Flake) -> dict[str, Any]:
    """What NixOS makes of the module's options: the configuration file, and the files of rules."""
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not here: apt-get install prometheus")
    said: dict[str, Any] = flake(
        "nixosConfigurations.orin-llm",
        """host: let
          all.orin.telemetry.exporter.debugfs.enable = true;
          p = (host.extendModules { modules = [ all ]; }).config.services.prometheus;
        in {
          inherit (p) listenAddress;
          rules = map baseNameOf p.ruleFiles;
          config = {
            global = p.globalConfig;
            scrape_configs = map (job: { inherit (job) job_name static_configs; }) p.scrapeConfigs;
          };
        }""",
    )
    return said


def without_null(value: Any) -> Any:
    """NixOS leaves options that are null out of the file."""
    if isinstance(value, dict):
        return {k: without_null(v) for k, v in value.items() if v is not None and k != "_module"}
    if isinstance(value, list):
        return [without_null(item) for item in value]
    return value


def test_promtool_takes_the_configuration(prometheus: dict[str, Any], tmp_path: Path) -> None:
    rules = ROOT / "telemetry" / "rules"
    config = without_null(prometheus["config"])
    config["rule_files"] = [str(rules / name) for name in prometheus["rules"]]
    path = tmp_path / "prometheus.yml"
    path.write_text(json.dumps(config))  # JSON is YAML
    result = subprocess.run(
        ["promtool", "check", "config", str(path)], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "rules found" in result.stdout


def test_every_rule_file_is_used(prometheus: dict[str, Any]) -> None:
    there = {path.name for path in (ROOT / "telemetry" / "rules").glob("*.yml")}
    # In the store a file's name has its hash in front.
    assert {name.split("-", 1)[-1] for name in prometheus["rules"]} == there


def test_all_that_runs_is_scraped_and_on_the_loopback(prometheus: dict[str, Any]) -> None:
    jobs = {
        job["job_name"]: [c["targets"] for c in job["static_configs"]]
        for job in prometheus["config"]["scrape_configs"]
    }
    # One target a job: all have the host as their instance, and two would share one `up`.
    assert jobs == {
        "jetson": [["127.0.0.1:9401"]],
        "jetson-debugfs": [["127.0.0.1:9402"]],
        "llm": [["127.0.0.1:9403"]],
        "node": [["127.0.0.1:9100"]],
        "prometheus": [["127.0.0.1:9090"]],
    }
    assert prometheus["listenAddress"] == "127.0.0.1"
