# ruff: noqa: E501 - regular expressions stay on one line
"""Ask NVIDIA's compute-sanitizer about every kernel of planted.ptx and write verdicts.json.

    python tests/simulator/sanitizer/verdicts/record_verdicts.py HOST [--out FILE]

Needs an NVIDIA GPU, compute-sanitizer on PATH, and HOST, which is host.cpp built. Each kernel runs
once under each tool, in a process of its own.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from cases import CASES, Case  # type: ignore[import-not-found]  # noqa: E402

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
SECONDS = 25
"""A kernel with a broken barrier may hang: it is stopped after this long."""


def ask(job: tuple[str, Case, str]) -> tuple[str, str, dict[str, object]]:
    """One kernel under one tool."""
    host, case, tool = job
    argv = ["timeout", str(SECONDS), "compute-sanitizer", "--tool", tool, "--print-limit", "4", host,
            str(HERE.parent / "planted.ptx"), case.kernel, case.block, str(case.grid), str(case.shared),
            *case.args.split()]  # fmt: skip
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    text = done.stdout + done.stderr
    found = [line.strip("= ") for line in text.splitlines() if line.startswith("=========")]
    errors = re.search(r"ERROR SUMMARY: (\d+) error", text)
    hazards = re.search(
        r"RACECHECK SUMMARY: (\d+) hazards? displayed \((\d+) errors?, (\d+) warn", text
    )
    count = int(hazards[1]) if hazards else int(errors[1]) if errors else -1
    kept = [
        line for line in found if line and "Saved host" not in line and "Host Frame" not in line
    ][1:7]
    answer = {"status": done.returncode, "errors": count, "said": kept}
    return case.kernel, tool, answer


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("host")
    parser.add_argument("--out", type=Path, default=HERE / "verdicts.json")
    args = parser.parse_args()
    jobs = [(args.host, case, tool) for case in CASES for tool in TOOLS]
    ask_version = ["compute-sanitizer", "--version"]
    version = subprocess.run(ask_version, capture_output=True, text=True, check=False)
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    machine = subprocess.run(query, capture_output=True, text=True, check=False)
    about = {
        "command": "python tests/simulator/sanitizer/verdicts/record_verdicts.py HOST",
        "machine": machine.stdout.strip(),
        "tool": version.stdout.strip().splitlines()[-1:],
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    verdicts: dict[str, dict[str, object]] = {}
    with ThreadPoolExecutor(os.cpu_count() or 2) as pool:
        for kernel, tool, answer in pool.map(ask, jobs):
            verdicts.setdefault(kernel, {})[tool] = answer
            args.out.write_text(json.dumps({"about": about, "verdicts": verdicts}, indent=0) + "\n")
            print(kernel, tool, answer["errors"], answer["status"], flush=True)


if __name__ == "__main__":
    main()
