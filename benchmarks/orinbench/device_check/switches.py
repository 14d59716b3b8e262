"""Before and after each patch: the series as it is, and without the patch and what needs it.

`tools/series checkout DIR` makes a git tree with a commit a patch, whose trailers say what it is
called and what it depends on. For each patch that a board can show, the commits that stay are put
onto the base, and the patch's probe (`patch_probes.py`) runs on both trees: with, without, without,
with, so that a drift of the board does not look like a patch.
"""

import json
import os
import re
import shutil
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from orinbench.child import run
from orinbench.device_check.patch_probes import WITH_MODEL
from orinbench.errors import BenchError

# The probe of each patch that a board can show.
PROBED = {
    "0001": "opens",
    "0002": "resubmitted",
    "0003": "copies",
    "0004": "growing_local_memory",
    "0005": "named_fault",
    "0006": "matvec",
    "0008": "odd_view",
    "0011": "cache",
    "0015": "wrapped_arguments",
    "0021": "freed_after_a_fault",
}
# Reason for showing nothing of the others.
NOT_PROBED = {
    "0007": "starts the processes of a search: no GPU is in it",
    "0009": "finds headers and libraries: nothing to measure",
    "0010": "is for CUDA's graphs",
    "0016": "shows where an allocation fails: no step takes memory to its end",
    "0017": "changes numbers, in the same way on every device",
    "0018": "shows where an allocation fails: no step takes memory to its end",
    "0027": "is a question of the step performance: shared_memory",
    "0026": "is for a Python that stops at 1500 calls: no GPU is in it",
}
# Those whose absence makes the GPU write where it should not, or stop a process, come last.
_LAST = ("0004", "0008", "0005", "0021")
PROBE = (sys.executable, "-m", "orinbench.device_check.patch_probes")
# Time limit of one run; a device that faults waits, and kernels are generated first.
_RUN_SECONDS = 150.0
# Without 0005 a fault is waited for as long as tinygrad waits at all.
_FAULT_WAIT_MS = "10000"
_TRAILER = re.compile(r"^(Patch-Name|Depends-on): (.+)$", re.MULTILINE)
# Whoever commits in a scratch tree; nobody sees it.
_IDENTITY = {
    f"GIT_{who}_{what}": value
    for who in ("AUTHOR", "COMMITTER")
    for what, value in (("NAME", "device-check"), ("EMAIL", "device-check@localhost"))
}

Found = dict[str, Any]


@dataclass(frozen=True)
class Patch:
    """A commit of the checkout: its number and subject, and the numbers that it depends on."""

    number: str
    subject: str
    commit: str
    needs: frozenset[str]


def patches_of(trees: Path) -> list[Patch]:
    """Return the patches of a checkout, in their order.

    Raises BenchError where `trees` is something else.
    """
    if shutil.which("git") is None:
        raise BenchError(f"--trees {trees}: git, which reads it, is not on PATH")
    said = _git(trees, "log", "--reverse", "--format=%H%n%B%x00", "base..HEAD")
    if said is None or not (trees / "tinygrad" / "__init__.py").exists():
        raise BenchError(f"--trees {trees}: want what `tools/series checkout` makes")
    found = []
    for entry in filter(None, (part.strip() for part in said.split("\0"))):
        commit, _, message = entry.partition("\n")
        trailers = dict(_TRAILER.findall(message))
        if "Patch-Name" not in trailers:
            raise BenchError(f"--trees {trees}: {commit[:12]} has no Patch-Name: no clean checkout")
        needs = frozenset(re.findall(r"\d{4}", trailers.get("Depends-on", "")))
        subject = message.partition("\n")[0]
        found.append(Patch(trailers["Patch-Name"][:4], subject, commit, needs))
    return found


def left_out_with(patches: Sequence[Patch], number: str) -> list[str]:
    """Return a patch's number and those of the patches that depend on it, also through others."""
    gone = {number}
    for patch in patches:
        if patch.needs & gone:
            gone.add(patch.number)
    return sorted(gone)


def switch(
    trees: Path,
    numbers: Sequence[str] | None,
    run_probe: Callable[[Path, str, float], Found],
    until: float,
    keep: Callable[[dict[str, Found]], None],
) -> dict[str, Found]:
    """Measure with and without each patch until done or `until` of time.monotonic().

    `numbers` names the patches, None all. `run_probe` runs a probe on a tree, for so many seconds
    at most. `keep` gets what there is after each patch. A patch for which the time was too short
    has no rounds.
    """
    patches = patches_of(trees)
    chosen = [p for p in patches if numbers is None or p.number in numbers]
    chosen.sort(key=lambda p: (_LAST.index(p.number) if p.number in _LAST else -1, p.number))
    found: dict[str, Found] = {}
    with tempfile.TemporaryDirectory(prefix="orinbench-switches-") as directory:
        room = Path(directory)
        whole = _tree(trees, patches, [], room)
        for patch in chosen:
            gone = left_out_with(patches, patch.number)
            entry: Found = {"patch": patch.subject, "left_out": gone, "reason": None}
            entry |= {"with": [], "without": [], "ratio": {}}
            found[patch.number] = entry
            unknown = "has no probe in this version of device-check"
            if (probe := PROBED.get(patch.number)) is None:
                entry["reason"] = NOT_PROBED.get(patch.number, unknown)
            elif (bare := _tree(trees, patches, gone, room)) is None:
                entry["reason"] = f"the others do not apply without {', '.join(gone)}"
            else:
                assert whole is not None, "the checkout's own commits apply"
                for side in ("with", "without", "without", "with"):
                    left = min(until - time.monotonic(), _RUN_SECONDS)
                    if left <= 0:
                        return found
                    tree = whole if side == "with" else bare
                    entry[side].append(run_probe(tree, probe, left))
                entry["ratio"] = ratios(entry["with"], entry["without"])
                shutil.rmtree(bare)
            keep(found)
    return found


def ratios(having: Sequence[Found], lacking: Sequence[Found]) -> dict[str, float]:
    """Return, of each figure above zero on both sides, the medians' ratio, with over without."""
    found = {}
    for name in having[0]:
        sides: list[list[Any]] = [[e.get(name) for e in side] for side in (having, lacking)]
        if all(type(v) in (int, float) and v > 0 for side in sides for v in side):
            found[name] = round(median(sides[0]) / median(sides[1]), 4)
    return found


def probe_runner(
    environment: Mapping[str, str],
    sizes: str,
    model: Callable[[], Path],
    command: Sequence[str] = PROBE,
) -> Callable[[Path, str, float], Found]:
    """Return what runs a probe on a tree; `model` is asked for a GGUF where a probe wants one."""

    def run_probe(tree: Path, name: str, seconds: float) -> Found:
        out = tree / "found.json"
        out.unlink(missing_ok=True)
        path = os.pathsep.join(filter(None, (str(tree), os.environ.get("PYTHONPATH"))))
        asked = (out, name, sizes, model() if name in WITH_MODEL else "-")
        bounded = {"HCQDEV_WAIT_TIMEOUT_MS": _FAULT_WAIT_MS} if name == "named_fault" else {}
        variables = {**environment, **bounded, "PYTHONPATH": path}
        ended = run([*command, *asked], seconds, variables)
        if out.exists():
            found: Found = json.loads(out.read_text())
            return found
        if ended.status is None:
            return {"error": f"not done in {seconds:.0f} s"}
        return {"error": ended.reason}

    return run_probe


def _tree(trees: Path, patches: Sequence[Patch], gone: Sequence[str], room: Path) -> Path | None:
    """Unpack the series without some patches; None where the others do not apply."""
    work, tree = room / "work", room / ("without-" + "-".join(gone) if gone else "whole")
    if not work.exists():
        _require(room, "clone", "--quiet", "--shared", str(trees.absolute()), "work")
    _require(work, "checkout", "--quiet", "--force", "--detach", "base")
    kept = [patch.commit for patch in patches if patch.number not in gone]
    if kept and _git(work, "cherry-pick", "--allow-empty", *kept) is None:
        _require(work, "cherry-pick", "--abort")
        return None
    tree.mkdir()
    packed = room / "tinygrad.tar"
    _require(work, "archive", "-o", str(packed), "HEAD", "tinygrad")
    with tarfile.open(packed) as tar:
        tar.extraction_filter = getattr(tarfile, "data_filter", None)  # none in Python 3.11.2
        tar.extractall(tree)
    return tree


def _git(where: Path, *arguments: str) -> str | None:
    """Return what git says, None if it fails; a surrounding git's variables do not count."""
    surroundings = [n for n in os.environ if n.startswith("GIT_") and n not in _IDENTITY]
    command = ["env", *(f"--unset={name}" for name in surroundings), "git", "-C", where]
    done = run([*command, "-c", "commit.gpgsign=false", *arguments], environment=_IDENTITY)
    return None if done.status else done.out


def _require(where: Path, *arguments: str) -> None:
    if _git(where, *arguments) is None:
        raise RuntimeError(f"git {' '.join(arguments)} failed in a copy of --trees")
