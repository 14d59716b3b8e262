"""Plain Nix in a store of its own: nothing is left behind, and nobody has to be root."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "patches" / "tinygrad"
PlainNix = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def plain_nix(tmp_path_factory: pytest.TempPathFactory) -> PlainNix:
    """Call a program of Nix with a fresh store; needs Debian's nix-bin at least."""
    if shutil.which("nix-build") is None:
        pytest.skip("nix-build is not here: apt-get install nix-bin")
    home = tmp_path_factory.mktemp("nix")
    environment = os.environ | {
        "HOME": str(home),
        "NIX_CONF_DIR": str(home / "etc"),
        "NIX_LOG_DIR": str(home / "log"),
        "NIX_PATH": "",
        "NIX_STATE_DIR": str(home / "var"),
        "NIX_STORE_DIR": str(home / "store"),
    }
    # A daemon's settings have no say here.
    environment.pop("NIX_REMOTE", None)
    (home / "etc").mkdir()
    (home / "etc" / "nix.conf").write_text("sandbox = false\nbuild-users-group =\nsubstituters =\n")

    def call(*command: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(word) for word in command],
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=600,
        )

    return call


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tinygrad's sdist, as `tools/series` caches it or as pip downloads it; its hash is checked."""
    base = json.loads((FOLDER / "base.json").read_text())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    cached = cache / "tinygrad-orin" / f"{base['name']}-{base['version']}.tar.gz"
    if not cached.is_file():
        folder = tmp_path_factory.mktemp("sdist")
        wanted = f"{base['name']}=={base['version']}"
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary"]
        subprocess.run([*pip, ":all:", "--dest", str(folder), wanted], check=True, timeout=300)
        (cached,) = folder.glob("*.tar.gz")
    assert hashlib.sha256(cached.read_bytes()).hexdigest() == base["sha256"], cached
    return cached
