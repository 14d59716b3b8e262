"""HeCBench's programs on the simulator: `python -m tests.simulator.cuda.hecbench FOLDER [NAME...]`.

FOLDER is a checkout of https://github.com/zjin-lcf/HeCBench; nothing of it is kept here.
hecbench.txt lists programs that check themselves and need no vendor library, each with arguments of
a size for a CPU. A program is right if it ends with 0 and says PASS, with no finding of the
simulator: one whose calls and kernels all failed may compare what nobody wrote, and say PASS.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from nvgpusim.cuda.compile import GENERATED, nvcc_path
from nvgpusim.cuda.program_runner import build_stand_in, cuda_include_folder
from nvgpusim.options import cache_directory

LIST = Path(__file__).with_suffix(".txt")
RAN = re.compile(r"(?m)^nvgpusim: [1-9]\d* launches, \d+ thread instructions, 0 findings$")
RIGHT, WRONG = re.compile(r"\bPASS", re.I), re.compile(r"\bFAIL", re.I)


def sources(folder: Path) -> list[str]:
    """The files that a program's Makefile names."""
    text = (folder / "Makefile").read_text().replace("\\\n", " ")
    found = re.search(r"(?m)^source\s*:?=(.*)$", text)
    return found[1].split() if found else []


def run(folder: Path, arguments: list[str], seconds: float, sanitize: str) -> str:
    """Outcome of a program: "pass", or why not."""
    with tempfile.TemporaryDirectory(prefix="hecbench-") as scratch:
        goal = Path(scratch, "program")
        stand_in = build_stand_in(cuda_include_folder(), cache_directory())
        command = [nvcc_path(), *GENERATED, "-g", "-O3", "-std=c++17", "-cudart", "none", "-w"]
        command += [
            "-expt-relaxed-constexpr",
            "-extended-lambda",
            "-I../include",
            *sources(folder),
            f"-L{stand_in}",
            "-lcudart",
            "-lcuda",
        ]
        command += ["-o", goal]
        made = subprocess.run(
            list(map(str, command)), cwd=folder, capture_output=True, text=True, check=False
        )
        if made.returncode:
            lines = [x for x in made.stderr.splitlines() if "error" in x or "undefined" in x]
            return f"does not compile: {lines[0] if lines else made.stderr[-200:]}"
        watched = ["--sanitize", sanitize] if sanitize else []
        simulator = [sys.executable, "-m", "nvgpusim", "cuda", *watched]
        with subprocess.Popen(
            [*simulator, str(goal), *arguments],
            cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        ) as started:  # fmt: skip
            try:
                out, err = started.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                os.killpg(started.pid, signal.SIGKILL)  # the program, too
                return f"more than {seconds:.0f} s"
    return judged(started.returncode, out, err)


def judged(status: int, out: str, err: str) -> str:
    """Outcome of a program that has ended."""
    found = re.search(r"(?m)^nvgpusim: (note: .*)", err)
    if found:
        return f"found: {found[1]}"
    if status or WRONG.search(out) or not RIGHT.search(out) or not RAN.search(err):
        return f"ends with {status}: " + " / ".join((out + err).strip().splitlines()[-3:])
    return "pass"


def listed() -> dict[str, list[str]]:
    """Arguments by name."""
    rows = [line.split() for line in LIST.read_text().splitlines()]
    return {row[0]: row[1:] for row in rows if row and row[0] != "#"}


def main() -> int:
    """Run some or all; 1 where one is not right."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", help="some of the list, or NAME=ARGUMENT,ARGUMENT...")
    parser.add_argument("--seconds", type=float, default=60, help="of a program's run")
    parser.add_argument("--sanitize", default="", help="as of nvgpusim cuda")
    args = parser.parse_intermixed_args()
    os.environ.setdefault("CUDA_PATH", str(nvcc_path().resolve().parents[1]))
    known, outcomes = listed(), Counter[str]()
    for given in args.names or known:
        name, _, words = given.partition("=")
        folder = args.folder / "src" / f"{name}-cuda"
        if not folder.is_dir() or (name not in known and "=" not in given):
            parser.error(f"{name}: not in {folder.parent} or in {LIST.name}")
        began = time.monotonic()
        arguments = words.split(",") if words else known.get(name, [])
        outcome = run(folder, arguments, args.seconds, args.sanitize)
        outcomes[outcome.split(":")[0]] += 1
        print(f"{name:28} {time.monotonic() - began:6.1f} s  {outcome}", flush=True)
    print(", ".join(f"{count} {what}" for what, count in outcomes.most_common()))
    return int(set(outcomes) != {"pass"})


if __name__ == "__main__":
    sys.exit(main())
