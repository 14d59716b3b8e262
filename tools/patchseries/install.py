"""Patched tinygrad into a virtual environment, whole or not at all."""

import base64
import csv
import hashlib
import tempfile
from pathlib import Path

from .process import SeriesError, pip
from .series import Series
from .tree import apply_patches, fetch_sdist, unpack_tar


def is_installed(series: Series, venv: Path) -> bool:
    """True if this very series is in the environment, each file as its RECORD says."""
    name = f"{series.base.name}-{series.patched_version()}.dist-info"
    sites = [*venv.glob(f"lib/python3*/site-packages/{series.base.name}-*.dist-info")]
    return len(sites) == 1 and sites[0].name == name and _matches_record(sites[0])


def _matches_record(info: Path) -> bool:
    try:
        with (info / "RECORD").open(newline="") as f:
            for file, digest, _ in csv.reader(f):
                if not digest:
                    continue
                kind, _, want = digest.partition("=")
                got = hashlib.new(kind, (info.parent / file).read_bytes()).digest()
                if base64.urlsafe_b64encode(got).rstrip(b"=").decode() != want:
                    return False
    except (OSError, ValueError):
        return False
    return True


def build_wheel(series: Series, sdist: Path, python: Path, scratch: Path) -> Path:
    """Unpack, patch, stamp the version and build below `scratch`; returns the wheel."""
    tree = apply_patches(unpack_tar(sdist, scratch / "tree"), series.patches)
    pyproject, line = tree / "pyproject.toml", f'version = "{series.base.version}"'
    text = pyproject.read_text()
    if text.count(line) != 1:
        raise SeriesError(f"pyproject.toml of the base: want one line '{line}'", 1)
    pyproject.write_text(text.replace(line, f'version = "{series.patched_version()}"'))
    pip(python, "wheel", "--wheel-dir", scratch / "wheel", tree, what="cannot build the wheel")
    wheels = [*(scratch / "wheel").glob("*.whl")]
    if len(wheels) != 1:
        raise SeriesError(f"the build made {len(wheels)} wheels, want one", 1)
    return wheels[0]


def install_if_missing(series: Series, venv: Path, sdist: Path | None) -> bool:
    """Put the patched base into `venv`; False when it is there already.

    Everything is built in a temporary folder; the environment is touched by one `pip install` of a
    finished wheel, which puts back what was there before if it fails.

    Raises:
        SeriesError: no environment, no sdist, a wrong hash, a patch that does not apply, a build
            or an installation that fails.
    """
    # Not resolved: the link in bin/ is what makes it the environment's interpreter.
    python = (venv / "bin" / "python").absolute()
    if not (venv / "pyvenv.cfg").is_file() or not python.exists():
        raise SeriesError(f"{venv}: not a virtual environment (make one with python3 -m venv)")
    if is_installed(series, venv):
        return False
    archive = fetch_sdist(series.base, sdist, python)
    with tempfile.TemporaryDirectory(prefix="tinygrad-orin-") as tmp:
        wheel = build_wheel(series, archive, python, Path(tmp))
        pip(python, "install", "--force-reinstall", wheel, what=f"cannot install into {venv}")
    if not is_installed(series, venv):
        raise SeriesError(f"{venv}: pip finished, but {series.patched_version()} is not whole", 1)
    return True
