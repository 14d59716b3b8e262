"""Evaluating the flake: needs Nix with flakes and its inputs, which a plain Debian has not."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Another way to call Nix, as a wrapper that brings the inputs along.
NIX = shlex.split(os.environ.get("NIX", "nix"))

for folder in ("modules/performance", "modules/upgrade", "install", ""):
    sys.path.insert(0, str(ROOT / "nixos" / folder))


def nix(*arguments: str, timeout: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*NIX, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=timeout
    )


@pytest.fixture(scope="session")
def flake() -> Callable[..., Any]:
    """`flake(attribute, apply)`: a value of the flake as JSON."""
    if shutil.which(NIX[0]) is None:
        pytest.skip(f"{NIX[0]} is not here: https://nixos.org/download")
    features = ["--extra-experimental-features", "nix-command flakes"]
    probe = nix("eval", *features, "--json", ".#formatter.x86_64-linux.name", timeout=300)
    if probe.returncode != 0:
        errors = [line for line in probe.stderr.splitlines() if line.strip().startswith("error:")]
        reason = errors[-1].strip() if errors else f"exit code {probe.returncode}"
        pytest.skip(f"this flake does not evaluate with `{' '.join(NIX)}` here: {reason}")

    def evaluate(attribute: str, apply: str | None = None) -> Any:
        applied = [] if apply is None else ["--apply", apply]
        result = nix("eval", *features, "--json", f".#{attribute}", *applied, timeout=900)
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)

    return evaluate
