"""Revisions of the patch series, each built into a virtual environment of its own, once.

The environment holds that revision's tinygrad alone; everything else comes from the environment
that orinbench runs in, so that both sides are measured by the same code.
"""

import fcntl
import hashlib
import os
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from orinbench.benchmark.journal import journal_directory
from orinbench.child import run
from orinbench.errors import BenchError
from orinbench.talk import Talk

PARTS = ("tools", "patches")
# Present once the environment is whole; holds the version of its tinygrad.
COMPLETE = "tinygrad-version"
PATH_FILE = "orinbench-parent.pth"
VERSION_PROGRAM = "from importlib.metadata import version; print(version('tinygrad'))"


@dataclass(frozen=True)
class Revision:
    """A commit of a checkout of this repository: `name` is what the user called it."""

    name: str
    commit: str
    repository: Path
    patches: str  # git's name of the tree patches/tinygrad


@dataclass(frozen=True)
class Built:
    """A revision that can be run: its interpreter, the version of its tinygrad, its own folder."""

    revision: Revision
    python: Path
    version: str
    folder: Path


def find_revision(name: str, directory: Path) -> Revision | None:
    """Return the revision that `name` means in the checkout around `directory`; None if none."""
    top = _git(directory, "rev-parse", "--show-toplevel")
    if top is None:
        return None
    repository = Path(top)
    commit = _git(
        repository, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}"
    )
    if commit is None:
        return None
    tree = _git(repository, "rev-parse", "--verify", "--quiet", f"{commit}:patches/tinygrad")
    if tree is None or _git(repository, "cat-file", "-e", f"{commit}:tools/series") is None:
        raise BenchError(f"{name}: this revision has no tools/series and patches/tinygrad to build")
    return Revision(name, commit, repository, tree)


def build(revision: Revision, talk: Talk) -> Built:
    """Return the revision's environment, made now if it is not there; raises BenchError."""
    parent = "\n".join([sys.version, sys.prefix, *_parent_directories()])
    key = hashlib.sha256(f"{revision.patches}\n{parent}".encode()).hexdigest()[:16]
    folder = journal_directory().with_name("revisions") / key
    python = folder / "venv" / "bin" / "python"
    with _locked(folder.with_suffix(".lock")):
        complete = folder / COMPLETE
        if not complete.is_file():
            talk.phase(f"building tinygrad of {revision.name} ({revision.commit[:12]})")
            shutil.rmtree(folder, ignore_errors=True)
            _install(revision, folder)
            (version,) = _run(revision, [str(python), "-c", VERSION_PROGRAM]).split()
            complete.write_text(version)
        return Built(revision, python, complete.read_text(), folder)


def _install(revision: Revision, folder: Path) -> None:
    """Make the environment, and let the revision's own tools/series put its tinygrad there."""
    venv = folder / "venv"
    _run(revision, [sys.executable, "-m", "venv", str(venv)])
    with tempfile.TemporaryDirectory(prefix="orinbench-") as place:
        packed = Path(place, "parts.tar")
        archive = ["git", "-C", revision.repository, "archive", "-o", packed, revision.commit]
        _run(revision, [*archive, *PARTS])
        with tarfile.open(packed) as tar:
            tar.extraction_filter = getattr(tarfile, "data_filter", None)  # none in Python 3.11.2
            tar.extractall(place)
        _run(revision, [sys.executable, f"{place}/tools/series", "install", str(venv)])
    (site,) = venv.glob("lib/python3*/site-packages")
    # Behind the environment's own packages, so that its tinygrad is the one that is imported.
    lines = [f"import site; site.addsitedir({path!r})\n" for path in _parent_directories()]
    (site / PATH_FILE).write_text("".join(lines))


def _parent_directories() -> list[str]:
    """Return where the running Python has its packages, what PYTHONPATH adds first."""
    added = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    ends = ("site-packages", "dist-packages")
    installed = [path for path in sys.path if path.endswith(ends) and os.path.isdir(path)]
    return list(dict.fromkeys(os.path.abspath(path) for path in added + installed))


def _run(revision: Revision, command: Sequence[object]) -> str:
    """Return what a step of the build prints, without PYTHONPATH: it may have a tinygrad too."""
    done = run(command, environment={"PYTHONPATH": ""})
    if done.status:
        raise BenchError(f"{revision.name}: cannot be built: {done.reason}")
    return done.out


def _git(directory: Path, *arguments: str) -> str | None:
    """Return what git prints, None if it fails or is not there."""
    try:
        done = run(["git", "-C", directory, *arguments])
    except OSError:
        return None
    return None if done.status else done.out.strip()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Let one process at a time build one environment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
