"""Run tinygrad's own tests on TegraIface and the simulator, and say how each file ended.

    tools/series install .venv && .venv/bin/python tests/patches/upstream.py UPSTREAM

UPSTREAM is a checkout of tinygrad at the tag of the base (v0.13.0); its tests are not part of this
repository. Each file is a process of its own, so that a GPU error ends only its file.
Prints a table and the reason of every test that failed or was skipped; exit status 1 when one
failed. With --strict the simulator watches every launch, and a finding is a failure. torch, the
reference of test_ops, has to be installed; test_gguf downloads.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.patches.conftest import COMPILERS, CUDA_HEADER, REPOSITORY, wheel_file

FINDINGS = 3
"""Exit status of nvgpusim --strict where the program itself succeeded."""
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


def environment(upstream: Path) -> dict[str, str]:
    """Environment of the tests: the device, the simulator, and time for an interpreted GPU."""
    spec = importlib.util.find_spec("tinygrad")
    assert spec is not None and spec.origin is not None, "tinygrad is not installed"
    # A checkout has a tinygrad too: the one under test comes first, and no folder by itself.
    rooms = (Path(spec.origin).resolve().parents[1], REPOSITORY / "simulator", upstream)
    found = {name: str(wheel_file(pattern)) for name, pattern in COMPILERS.items()}
    found["CUDA_PATH"] = str(wheel_file(CUDA_HEADER).parents[1])
    # A process of nvcc for each kernel takes many times as long as NVRTC.
    return found | {"HCQDEV_WAIT_TIMEOUT_MS": "300000", "CCACHE": "0"} | os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, rooms)),
        "PYTHONSAFEPATH": "1",
        "DEV": "TEGRA+NV",
    }  # fmt: skip


def run(
    file: str, upstream: Path, timeout: float, flags: list[str], only: str
) -> list[tuple[str, str, str]]:
    """(test, outcome, reason) of each test of a file; `flags` are nvgpusim's, `only` pytest's."""
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "junit.xml"
        pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line"]
        pytest.append("--import-mode=append")
        pytest += ["-k", only] if only else []
        command = [sys.executable, "-m", "nvgpusim", "--quiet", *flags, "--", *pytest]
        command += [f"--junitxml={result}", file]
        try:
            done = subprocess.run(
                command, cwd=upstream, env=environment(upstream), timeout=timeout,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return [(file, "failed", f"took more than {timeout:.0f} s")]
        if not result.exists():
            return [(file, "failed", "the process died")]
        found = []
        for case in ElementTree.parse(result).iter("testcase"):
            outcome, reason = "passed", ""
            for child in case:
                if child.tag in ("failure", "error", "skipped"):
                    outcome = "skipped" if child.tag == "skipped" else "failed"
                    reason = (child.get("message") or "").splitlines()[0][:160]
            found.append((f"{case.get('classname')}::{case.get('name')}", outcome, reason))
        if done.returncode == FINDINGS:
            found.append((file, "failed", "the simulator has notes: nvgpusim report"))
        return found


def main() -> int:
    """Run everything; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("upstream", type=Path, help="tinygrad at the tag of the base")
    parser.add_argument("files", nargs="*", default=FILES, help="default: those that matter here")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds a file (3600)")
    parser.add_argument(
        "--strict", action="store_true", help="watch kernels: findings are failures"
    )
    parser.add_argument("--profile", default="r36", help="release of L4T (r36)")
    parser.add_argument("-k", default="", metavar="TESTS", help="pytest's -k")
    options = parser.parse_args()
    if not (options.upstream / "test/test_tiny.py").is_file():
        parser.error(f"{options.upstream}: has no test/test_tiny.py; want a checkout of tinygrad")
    upstream = options.upstream.resolve()
    flags = ["--profile", options.profile, *(["--strict"] if options.strict else [])]
    rows, reasons = [], []
    for file in options.files:
        outcomes = run(file, upstream, options.timeout, flags, options.k)
        count = Counter(outcome for _, outcome, _ in outcomes)
        print(f"{file}: {dict(count)}", file=sys.stderr, flush=True)
        rows.append(f"| {file} | {count['passed']} | {count['failed']} | {count['skipped']} |")
        reasons += [f"- {o}: {test}: {why}" for test, o, why in outcomes if o != "passed"]
    print("| file | passed | failed | skipped |\n|---|---|---|---|", *rows, sep="\n")
    print("", *reasons, sep="\n")
    return int(any(line.startswith("- failed") for line in reasons))


if __name__ == "__main__":
    sys.exit(main())
