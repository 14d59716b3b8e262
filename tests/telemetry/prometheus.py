"""A Prometheus of a test's own on loopback, with our rules."""

import json
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        return int(unused.getsockname()[1])


def answer(url: str, path: str, **parameters: str) -> Any:
    """The `data` of an answer of Prometheus' API."""
    asked = f"{url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
    with urllib.request.urlopen(asked, timeout=10) as found:
        return json.load(found)["data"]


class Prometheus:
    """Runs `prometheus` over a folder of its own: jobs with their targets, every second."""

    def __init__(self, targets: Mapping[str, Sequence[str]], rules: Sequence[Path]) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self._directory = Path(tempfile.mkdtemp(prefix="jetson-prometheus-"))
        jobs = [
            {
                "job_name": job,
                "scrape_timeout": "1s",
                "static_configs": [{"targets": list(addresses), "labels": {"host": "demo"}}],
            }
            for job, addresses in targets.items()
        ]
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(rule) for rule in rules],
            "scrape_configs": jobs,
        }
        (file := self._directory / "prometheus.yml").write_text(json.dumps(config))
        flags = [f"--config.file={file}", f"--storage.tsdb.path={self._directory / 'data'}"]
        flags += [f"--web.listen-address={self.url.removeprefix('http://')}", "--log.level=warn"]
        self._process = subprocess.Popen(["prometheus", *flags], start_new_session=True)

    def __enter__(self) -> Self:
        deadline = time.monotonic() + 60
        while True:
            assert self._process.poll() is None and time.monotonic() < deadline
            try:
                with urllib.request.urlopen(f"{self.url}/-/ready", timeout=1):
                    return self
            except OSError:
                time.sleep(0.1)

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)

    def query(self, expression: str, at: float | None = None) -> list[dict[str, Any]]:
        """The series of an instant query, now or at a Unix time."""
        moment = {} if at is None else {"time": f"{at:.3f}"}
        result: list[dict[str, Any]] = answer(self.url, "query", query=expression, **moment)[
            "result"
        ]
        return result

    def value(self, expression: str, at: float | None = None) -> float | None:
        """The value of a query that gives one series; None if it gives none."""
        result = self.query(expression, at)
        return float(result[0]["value"][1]) if result else None

    def firing(self) -> dict[str, str]:
        """Alerts that fire, with their summaries."""
        return {
            alert["labels"]["alertname"]: alert["annotations"].get("summary", "")
            for alert in answer(self.url, "alerts")["alerts"]
            if alert["state"] == "firing"
        }
