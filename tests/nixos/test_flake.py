"""What the flake gives: derivations on both systems, and docs that say what the modules do."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Flake = Callable[..., Any]
ROOT = Path(__file__).resolve().parents[2]
SYSTEMS = ["aarch64-linux", "x86_64-linux"]


@pytest.mark.parametrize("system", SYSTEMS)
def test_packages_apps_and_shells_have_derivations(flake: Flake, system: str) -> None:
    packages = flake(f"packages.{system}", "builtins.mapAttrs (_: p: p.drvPath)")
    assert {"default", "tinygrad", "tinygrad-orin", "llama-cpp", "gpu-check"} <= packages.keys()
    apps = flake(f"apps.{system}", "builtins.mapAttrs (_: a: [ a.program a.meta.description ])")
    assert {
        "default",
        "chat",
        "serve",
        "llama-bench",
        "synth",
        "nvgpusim",
        "series",
        "exporter",
    } <= apps.keys()
    shells = flake(f"devShells.{system}", "builtins.mapAttrs (_: s: s.drvPath)")
    assert shells.keys() == {"default", "tinygrad", "llama-cpp"}
    for path in [*packages.values(), *shells.values()]:
        assert path.endswith(".drv")


def test_every_app_of_orinbench_is_a_command_of_it() -> None:
    """An app for a command that does not exist would fail at its first use."""
    text = (ROOT / "overlays" / "apps.nix").read_text()
    names = re.findall(r'= orinbench "([\w-]+)"', text)
    assert {"llama-bench", "synth"} <= set(names)
    rooms = os.pathsep.join(
        str(ROOT / room) for room in ("benchmarks", "engine", "simulator", "telemetry")
    )
    help_text = subprocess.run(
        [sys.executable, "-m", "orinbench", "--help"],
        env=os.environ | {"PYTHONPATH": rooms},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout
    commands = set(re.findall(r"^  ([\w-]+)  ", help_text, flags=re.MULTILINE))
    assert set(names) <= commands


def test_the_hosts_have_derivations_and_the_old_name_is_orin(flake: Flake) -> None:
    hosts = flake(
        "nixosConfigurations", "builtins.mapAttrs (_: h: h.config.system.build.toplevel.drvPath)"
    )
    assert hosts.keys() == {"orin", "orin-minimal", "orin-llm", "nixos-telemetry"}
    assert hosts["nixos-telemetry"] == hosts["orin"]
    assert len(set(hosts.values())) == 3


def test_wrong_use_says_what_it_should_and_no_more(flake: Flake) -> None:
    cases = flake("checks.x86_64-linux.wrong-use.report")
    assert len(cases) >= 9
    for name, case in cases.items():
        assert len(case["got"]) == len(case["wanted"]), (name, case)
        for text in case["wanted"]:
            assert any(text in message for message in case["got"]), (name, case)
        for message in case["got"]:
            assert message.startswith("host board: "), (name, message)
    assert sum(len(case["got"]) for case in cases.values()) > 60


def test_the_documented_options_are_those_of_the_modules(flake: Flake) -> None:
    page = (ROOT / "docs" / "nixos.md").read_text()
    head, marker, written = page.partition("<!-- options: ")
    assert marker and len(head) > 2000
    generated = flake("lib.optionsMarkdown")
    assert written.partition("-->\n\n")[2] == generated
    for name in re.findall(r"`(orin\.[\w.-]+)`", head):
        assert f"### `{name}" in generated or name.rstrip("*.") in generated, name
