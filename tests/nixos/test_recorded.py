"""The recorded host equals its evaluation."""

from collections.abc import Callable
from typing import Any

from tests.nixos.recorded import (
    DISK,
    FOLDER,
    SCRIPTS,
    UNITS,
    evaluated,
    generic,
    recorded,
)


def test_the_kept_files_are_the_evaluated_ones(flake: Callable[..., Any]) -> None:
    """Else: NIX=... .venv/bin/python -m tests.nixos.recorded."""
    assert recorded() == evaluated(flake)


def test_each_unit_is_kept_and_nothing_else() -> None:
    others = {"litellm.json", "prometheus.json", DISK}
    others |= {f"{name}.sh" for name in SCRIPTS}
    assert {path.name for path in FOLDER.iterdir()} == {*UNITS, *others}


def test_hashes_and_versions_are_left_out_and_nothing_more() -> None:
    store = "/nix/store/" + "a" * 32
    text = (
        f'ExecStart={store}-python3-3.13/bin/python3.13 {store}-x.py set\nEnvironment="PATH=/x"\n'
    )
    assert generic(text) == "ExecStart=/nix/store/any/bin/python3 /nix/store/x.py set\n"
