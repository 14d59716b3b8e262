"""Before and after each patch: the series as it is, and without the patch and what needs it.

`tools/series checkout DIR` makes a git tree with a commit a patch, whose trailers say what it is
called and what it depends on. For each patch that a board can show, the commits that stay are put
onto the base, and the patch's probe (`patch_probes.py`) runs on both trees.
"""

import os
import re
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from orinbench.child import run
from orinbench.device_check.check import Ask, in_turns, ratios
from orinbench.device_check.gpu import Found
from orinbench.errors import BenchError

# The probe of each patch that a board can show; docs/device-check.md says why the others have none.
PROBED = {
    "0001": Ask("computes"),
    "0002": Ask("resubmitted"),
    "0003": Ask("copies"),
    "0004": Ask("growing_local_memory"),
    # Without 0005 a fault is waited for as long as tinygrad waits at all.
    "0005": Ask("named_fault", {"HCQDEV_WAIT_TIMEOUT_MS": "10000"}),
    "0006": Ask("matvec"),
    "0008": Ask("odd_view"),
    "0011": Ask("cache", model=True),
    "0015": Ask("wrapped_arguments"),
    "0021": Ask("freed_after_a_fault"),
}
# Those whose absence makes the GPU write where it should not, or stop a process, come last.
_LAST = ("0004", "0008", "0005", "0021")
# Time limit of one run; a device that faults waits, and kernels are generated first.
_RUN_SECONDS = 150.0
_TRAILER = re.compile(r"^(Patch-Name|Depends-on): (.+)$", re.MULTILINE)
# Whoever commits in a scratch tree; nobody sees it.
_IDENTITY = {
    f"GIT_{who}_{what}": value
    for who in ("AUTHOR", "COMMITTER")
    for what, value in (("NAME", "device-check"), ("EMAIL", "device-check@localhost"))
}


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
    ask: Callable[[Ask, float], Found],
    until: float,
) -> Iterator[tuple[str, Found]]:
    """Yield each patch's number, and what its probe finds with it and without it.

    `numbers` names the patches, None all. Raises TimeoutError at `until` of time.monotonic().
    """
    patches = patches_of(trees)
    chosen = [p for p in patches if numbers is None or p.number in numbers]
    chosen.sort(key=lambda p: (_LAST.index(p.number) if p.number in _LAST else -1, p.number))
    with tempfile.TemporaryDirectory(prefix="orinbench-switches-") as directory:
        room = Path(directory)
        whole = _tree(trees, patches, [], room)
        assert whole is not None, "the checkout's own commits apply"
        for patch in chosen:
            gone = left_out_with(patches, patch.number)
            entry: Found = {"patch": patch.subject, "left_out": gone, "reason": None}
            entry |= {"with": [], "without": [], "ratio": {}}
            if (probe := PROBED.get(patch.number)) is None:
                entry["reason"] = "has no probe"
            elif (bare := _tree(trees, patches, gone, room)) is None:
                entry["reason"] = f"the others do not apply without {', '.join(gone)}"
            else:
                having, lacking = (partial(ask, _on(probe, tree)) for tree in (whole, bare))
                entry["with"], entry["without"] = in_turns(having, lacking, until, _RUN_SECONDS)
                entry["ratio"] = ratios(entry["with"], entry["without"])
                shutil.rmtree(bare)
            yield patch.number, entry


def _on(probe: Ask, tree: Path) -> Ask:
    """Return a probe on the tinygrad of a tree."""
    path = os.pathsep.join(filter(None, (str(tree), os.environ.get("PYTHONPATH"))))
    return replace(probe, variables={**probe.variables, "PYTHONPATH": path})


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
