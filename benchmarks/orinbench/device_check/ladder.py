"""The patch series as a ladder: the same figures on the base and after each patch.

`tools/series checkout DIR` makes a git tree with a commit a patch. Each commit is unpacked and used
instead of the installed tinygrad, up the series and down again, so that each rung is measured twice
and a drift of the board does not look like a patch.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from orinbench.device_check.process import run
from orinbench.errors import BenchError

PROBE = (sys.executable, "-m", "orinbench.device_check.gpu_probe")
# What one rung may take: compilation of a dozen kernels and a second of measuring.
_RUNG_SECONDS = 90.0

Rung = dict[str, Any]


def commits(trees: Path) -> list[tuple[str, str]]:
    """Return (commit, subject) of the base and of each patch.

    Raises BenchError where `trees` is something else.
    """
    if shutil.which("git") is None:
        raise BenchError(f"--trees {trees}: git, which reads it, is not on PATH")
    done = subprocess.run(
        ["git", "-C", str(trees), "log", "--reverse", "--format=%H %s"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode or not (trees / "tinygrad" / "__init__.py").exists():
        raise BenchError(f"--trees {trees}: want what `tools/series checkout` makes")
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in done.stdout.splitlines()]


def climb(
    trees: Path,
    environment: Mapping[str, str],
    until: float,
    keep: Callable[[Sequence[Rung]], None],
    probe: Sequence[str] = PROBE,
) -> list[Rung]:
    """Measure each rung, up and down, until done or `until` of time.monotonic().

    `keep` gets the rungs after each measurement. A rung on which the device does not open says so:
    that is what the first patches are for.
    """
    found = commits(trees)
    rungs: list[Rung] = [{"patch": subject, "rounds": []} for _, subject in found]
    with tempfile.TemporaryDirectory(prefix="orinbench-ladder-") as directory:
        up = list(range(len(found)))
        for index in up + up[::-1]:
            left = until - time.monotonic()
            if left <= 0:
                break
            commit = found[index][0]
            tree = Path(directory, commit)
            if not tree.exists():
                _unpack(trees, commit, tree)
            rungs[index]["rounds"].append(
                _measure(tree, environment, min(left, _RUNG_SECONDS), probe)
            )
            keep(rungs)
    return rungs


def _unpack(trees: Path, commit: str, to: Path) -> None:
    to.mkdir()
    archive = subprocess.run(
        ["git", "-C", str(trees), "archive", commit, "tinygrad"], capture_output=True, check=True
    )
    subprocess.run(["tar", "-x", "-C", str(to)], input=archive.stdout, check=True)


def _measure(
    tree: Path, environment: Mapping[str, str], seconds: float, probe: Sequence[str]
) -> dict[str, Any]:
    out = tree / "found.json"
    out.unlink(missing_ok=True)
    path = os.pathsep.join(filter(None, (str(tree), os.environ.get("PYTHONPATH"))))
    ended = run([*probe, out, "ladder"], seconds, {**environment, "PYTHONPATH": path})
    if out.exists():
        found: dict[str, Any] = json.loads(out.read_text())
        return found
    if ended.status is None:
        return {"error": f"not done in {seconds:.0f} s"}
    return {"error": ended.reason}
