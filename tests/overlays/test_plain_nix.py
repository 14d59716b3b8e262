"""Proofs by plain Nix of a fresh Debian.

Pin, order and version are read as `tools/series` reads them, and the series applies to the line and
imports.
"""

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "patches" / "tinygrad"
SERIES = ROOT / "overlays" / "series.nix"
PLAIN = ROOT / "tests" / "overlays" / "plain_tinygrad.nix"
PlainNix = Callable[..., subprocess.CompletedProcess[str]]


def build(plain_nix: PlainNix, expression: Path, sdist: Path) -> subprocess.CompletedProcess[str]:
    return plain_nix("nix-build", "--no-out-link", expression, "--arg", "sdist", sdist)


def test_nix_reads_what_tools_series_reads(plain_nix: PlainNix) -> None:
    result = plain_nix("nix-instantiate", "--eval", "--strict", "--json", SERIES)
    assert result.returncode == 0, result.stderr
    said = json.loads(result.stdout)

    sys.path.insert(0, str(ROOT / "tools"))
    from patchseries.series import read_series

    series = read_series(ROOT)
    assert said["base"] == json.loads((FOLDER / "base.json").read_text())
    assert said["names"] == [patch.file for patch in series.patches]
    assert said["hash"] == series.sha256()
    assert said["version"] == series.patched_version()


def test_the_hash_is_over_base_series_and_patches(plain_nix: PlainNix, tmp_path: Path) -> None:
    """The definition, worked out anew on a series of two made-up patches."""
    (tmp_path / "overlays").mkdir()
    shutil.copy(SERIES, tmp_path / "overlays")
    folder = tmp_path / "patches" / "tinygrad"
    folder.mkdir(parents=True)
    files = {
        "base.json": '{"name": "x", "version": "1.0", "sha256": "00"}\n',
        "series": "0001-a.patch\n0003-b.patch\n",
        "0001-a.patch": "one\n",
        "0003-b.patch": "two, with ümlaut\n",
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder / "0002-not-in-series.patch").write_text("left out\n")
    expected = hashlib.sha256("".join(files.values()).encode()).hexdigest()
    result = plain_nix(
        "nix-instantiate", "--eval", "--strict", "--json", tmp_path / "overlays" / "series.nix"
    )
    assert result.returncode == 0, result.stderr
    said = json.loads(result.stdout)
    assert said["hash"] == expected
    assert said["version"] == f"1.0+orin.{expected[:12]}"


def test_the_series_applies_to_the_line_and_imports(plain_nix: PlainNix, sdist: Path) -> None:
    result = build(plain_nix, PLAIN, sdist)
    assert result.returncode == 0, result.stderr
    out = Path(result.stdout.strip())
    patched = {
        line.removeprefix("+++ b/")
        for patch in FOLDER.glob("*.patch")
        for line in patch.read_text().splitlines()
        if line.startswith("+++ b/")
    }
    assert patched, "the series patches nothing"
    assert not [name for name in patched if not (out / name).is_file()]
    assert (out / "series-version").read_text() in plain_nix(
        "nix-instantiate", "--eval", SERIES, "-A", "version"
    ).stdout


@pytest.mark.parametrize("damage", ["a hunk whose context has drifted", "a module that fails"])
def test_a_series_that_does_not_hold_is_refused(
    plain_nix: PlainNix, sdist: Path, tmp_path: Path, damage: str
) -> None:
    """The same build on a copy with one line wrong: it would be no check if this passed."""
    for name in ("overlays", "patches", "tests/overlays"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.pyc"))
    folder = tmp_path / "patches" / "tinygrad"
    first = folder / (folder / "series").read_text().split()[0]
    lines = first.read_text().splitlines(keepends=True)
    if damage == "a module that fails":
        # A whole new file that tinygrad/__init__.py never asked for, and one line that does.
        lines += [
            "diff --git a/tinygrad/__init__.py b/tinygrad/__init__.py\n",
            "--- a/tinygrad/__init__.py\n",
            "+++ b/tinygrad/__init__.py\n",
            "@@ -1,1 +1,2 @@\n",
            "+import tinygrad.no_such_module\n",
            " import os\n",
        ]
    else:
        hunk = next(i for i, line in enumerate(lines) if line.startswith("@@"))
        context = next(i for i in range(hunk + 1, len(lines)) if lines[i].startswith(" "))
        lines[context] = " # nobody has ever written this line\n"
    first.write_text("".join(lines))
    result = build(plain_nix, tmp_path / "tests" / "overlays" / PLAIN.name, sdist)
    assert result.returncode != 0
    assert "FAILED" in result.stderr or "no_such_module" in result.stderr, result.stderr
