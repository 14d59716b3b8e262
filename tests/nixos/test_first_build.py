"""A first build: all that needs NVIDIA's sources is in no public cache."""

import importlib
import io
import json

import pytest

first_build = importlib.import_module("first_build")
DEB = "https://repo.download.nvidia.com/jetson/core.deb"


def derivation(name: str, *uses: str, **env: object) -> dict[str, object]:
    output = {"hash": "abc"} if "urls" in env else {}
    return {"name": name, "outputs": {"out": output}, "inputDrvs": dict.fromkeys(uses), "env": env}


CLOSURE = {
    "deb": derivation("core.deb", urls=DEB),
    "structured": derivation("git", urls="x") | {"env": {"__json": json.dumps({"url": DEB})}},
    "zlib.tar": derivation("zlib.tar", urls="https://zlib.net/zlib.tar"),
    "zlib": derivation("zlib", "zlib.tar", pname="zlib"),
    "bash": derivation("bash", pname="bash"),
    "core": derivation("l4t-core", "deb", "zlib"),
    "kernel": derivation("linux", "structured"),
    "unit": derivation("unit", "zlib", preferLocalBuild="1"),
    "toplevel": derivation("toplevel", "core", "kernel", "unit", allowSubstitutes=""),
}


def test_what_needs_nvidia_s_sources_is_built_here() -> None:
    parts = first_build.first_build(CLOSURE)
    assert parts.downloads == [DEB, DEB]
    assert parts.built == ["l4t-core", "linux"]
    assert (parts.own, parts.cached) == (2, 3)


def test_what_the_overlay_changes_is_built_here_and_all_that_uses_it() -> None:
    parts = first_build.first_build(CLOSURE, ["zlib"])
    assert parts.built == ["l4t-core", "linux", "zlib"]
    assert parts.cached == 2


def test_what_is_cross_compiled_is_in_few_caches() -> None:
    cross = {name: derivation(f"{name}-{first_build.CROSS}-1") for name in ("perl", "dbus")}
    parts = first_build.first_build(CLOSURE | cross)
    assert (parts.cross, parts.cached) == (2, 3)


def test_it_reads_what_nix_prints_and_refuses_all_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(CLOSURE)))
    assert first_build.main([]) == 0
    assert "2 builds that no public cache has:\n  l4t-core\n  linux\n" in capsys.readouterr().out
    terminal = io.StringIO(json.dumps(CLOSURE))
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    for given in (io.StringIO("[1]"), terminal):
        monkeypatch.setattr("sys.stdin", given)
        assert first_build.main([]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "nix derivation show -r HOST | first-build" in line
    with pytest.raises(SystemExit, match="2"):
        first_build.main([".#nixosConfigurations.orin"])
