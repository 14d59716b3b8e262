"""A Prometheus of one's own on loopback, for the demonstration and the tests."""

import json
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

#: Seconds that Prometheus may take to be ready or to end.
START_SECONDS, STOP_SECONDS = 30.0, 10.0


class PrometheusError(Exception):
    """Prometheus is missing, does not start, or refuses a query; the message is one line."""


def config(
    targets: Mapping[str, Sequence[str]], rules: Sequence[Path], interval: str
) -> dict[str, Any]:
    """prometheus.yml (JSON is YAML): jobs with their targets, rule files, scrape interval."""
    return {
        "global": {"scrape_interval": interval, "evaluation_interval": interval},
        "rule_files": [str(rule.resolve()) for rule in rules],
        "scrape_configs": [
            {
                "job_name": job,
                "scrape_timeout": interval,
                "static_configs": [{"targets": list(addresses), "labels": {"host": "demo"}}],
            }
            for job, addresses in targets.items()
        ],
    }


class Prometheus:
    """Runs `prometheus` from PATH over a temporary directory; a context manager."""

    def __init__(
        self,
        targets: Mapping[str, Sequence[str]],
        rules: Sequence[Path] = (),
        *,
        listen: str = "127.0.0.1:9090",
        interval: str = "1s",
    ) -> None:
        binary = shutil.which("prometheus")
        if binary is None:
            raise PrometheusError(
                "there is no prometheus on PATH; run: sudo apt-get install prometheus, "
                "or: nix shell nixpkgs#prometheus"
            )
        self.url = f"http://{listen}"
        self._directory = Path(tempfile.mkdtemp(prefix="jetson-prometheus-"))
        file = self._directory / "prometheus.yml"
        file.write_text(json.dumps(config(targets, rules, interval)))
        self._log = self._directory / "log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [
                    binary,
                    f"--config.file={file}",
                    f"--storage.tsdb.path={self._directory / 'data'}",
                    f"--web.listen-address={listen}",
                    "--log.level=warn",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def __enter__(self) -> "Prometheus":
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/-/ready", timeout=1):
                    return self
            except OSError:
                time.sleep(0.1)
        # A stranger's Prometheus on our port would be ready, and ours would have ended.
        lines = self._log.read_text().strip().splitlines()
        self.close()
        raise PrometheusError(f"prometheus at {self.url} did not start: {(lines or ['?'])[-1]}")

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End it and remove its data."""
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)

    def get(self, path: str, **parameters: str) -> Any:
        """The `data` of an API answer; raises PrometheusError with Prometheus' own words."""
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise PrometheusError(json.load(error)["error"]) from None

    def query(self, expression: str, at: float | None = None) -> list[dict[str, Any]]:
        """The series of an instant query, now or at a Unix time."""
        moment = {} if at is None else {"time": f"{at:.3f}"}
        result: list[dict[str, Any]] = self.get("query", query=expression, **moment)["result"]
        return result

    def value(self, expression: str, at: float | None = None) -> float | None:
        """The value of a query that gives one series; None if it gives none."""
        result = self.query(expression, at)
        return float(result[0]["value"][1]) if result else None

    def firing(self) -> dict[str, str]:
        """Alerts that fire, with their summaries."""
        return {
            alert["labels"]["alertname"]: alert["annotations"].get("summary", "")
            for alert in self.get("alerts")["alerts"]
            if alert["state"] == "firing"
        }
