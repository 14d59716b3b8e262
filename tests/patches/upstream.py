"""Run tinygrad's own tests on TegraIface and the simulator, and say how each file ended.

    tools/series install .venv && .venv/bin/python tests/patches/upstream.py UPSTREAM

UPSTREAM is a checkout of tinygrad at the tag of the base (v0.13.0); its tests are not part of this
repository. Each batch of tests is a process of its own, so that a GPU error ends only its batch.
Prints a table and the reason of every test that failed or was skipped; exit status 1 when one
failed. torch, the reference of test_ops, has to be installed; test_gguf downloads.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
FILES = (
    "test/test_tiny.py",
    "test/device/test_hcq.py",
    "test/backend/test_jit.py",
    "test/backend/test_graph.py",
    "test/backend/test_subbuffer.py",
    "test/backend/test_symbolic_jit.py",
    "test/unit/test_gguf.py",
    "test/backend/test_multitensor.py",
    "test/backend/test_ops.py",
)
BATCH = 40


def environment(upstream: Path) -> dict[str, str]:
    """What the tests need: the device, the simulator, and time for an interpreted GPU."""
    path = os.pathsep.join(
        filter(None, (os.environ.get("PYTHONPATH"), str(REPOSITORY / "simulator"), str(upstream)))
    )
    return {"HCQDEV_WAIT_TIMEOUT_MS": "300000", "CCACHE": "0"} | os.environ | {
        "PYTHONPATH": path,
        "DEV": "TEGRA+NV",
    }  # fmt: skip


def collect(file: str, upstream: Path) -> list[str]:
    """The ids of a file's tests. Raises SystemExit with pytest's words when it cannot be read."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", file],
        cwd=upstream, env=environment(upstream) | {"DEV": "CPU"}, capture_output=True, text=True,
    )  # fmt: skip
    ids = [line for line in done.stdout.splitlines() if "::" in line and "ERROR" not in line]
    if not ids:
        raise SystemExit(f"{file}: no tests\n{done.stdout[-2000:]}")
    return ids


def run(ids: list[str], upstream: Path, timeout: float) -> list[tuple[str, str, str]]:
    """(test, outcome, reason) of one process."""
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "junit.xml"
        pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line"]
        command = [sys.executable, "-m", "nvgpusim", "--quiet", "--", *pytest]
        command += [f"--junitxml={result}", *ids]
        try:
            subprocess.run(
                command, cwd=upstream, env=environment(upstream), timeout=timeout,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return [(i, "failed", f"the batch took more than {timeout:.0f} s") for i in ids]
        if not result.exists():
            return [(i, "failed", "the process died") for i in ids]
        found = []
        for case in ElementTree.parse(result).iter("testcase"):
            outcome, reason = "passed", ""
            for child in case:
                if child.tag in ("failure", "error", "skipped"):
                    outcome = "skipped" if child.tag == "skipped" else "failed"
                    reason = (child.get("message") or "").splitlines()[0][:160]
            found.append((f"{case.get('classname')}::{case.get('name')}", outcome, reason))
        return found


def main() -> int:
    """Run everything; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("upstream", type=Path, help="tinygrad at the tag of the base")
    parser.add_argument("files", nargs="*", default=FILES, help="default: those that matter here")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds a batch (1800)")
    options = parser.parse_args()
    if not (options.upstream / "test/test_tiny.py").is_file():
        parser.error(f"{options.upstream}: has no test/test_tiny.py; want a checkout of tinygrad")
    upstream = options.upstream.resolve()
    rows, reasons = [], []
    for file in options.files:
        ids, outcomes = collect(file, upstream), list[tuple[str, str, str]]()
        for start in range(0, len(ids), BATCH):
            outcomes += run(ids[start : start + BATCH], upstream, options.timeout)
            print(f"{file}: {min(start + BATCH, len(ids))}/{len(ids)}", file=sys.stderr, flush=True)
        count = Counter(outcome for _, outcome, _ in outcomes)
        rows.append(f"| {file} | {count['passed']} | {count['failed']} | {count['skipped']} |")
        reasons += [f"- {o}: {test}: {why}" for test, o, why in outcomes if o != "passed"]
    print("| file | passed | failed | skipped |\n|---|---|---|---|", *rows, sep="\n")
    print("", *reasons, sep="\n")
    return int(any(line.startswith("- failed") for line in reasons))


if __name__ == "__main__":
    sys.exit(main())
