"""A draft model in a host's configuration: what the server is told, and what is refused."""

from collections.abc import Callable
from typing import Any

Flake = Callable[..., Any]
DRAFT = "/var/lib/models/draft.gguf"

HOST = """
mkOrin:
let
  host = backend: draftModel: (mkOrin {
    hostName = "board";
    modules = [
      {
        orin.llm-server = { inherit backend; enable = true; };
        orin.llm-server.models.m = { file = "/var/lib/models/m.gguf"; inherit draftModel; };
      }
    ];
  }).config;
  found = config:
    let unit = config.systemd.services.orin-llm-server-m.serviceConfig; in {
      pre = map toString unit.ExecStartPre;
      command = toString unit.ExecStart;
      files = unit.BindReadOnlyPaths;
      failed = map (a: a.message) (builtins.filter (a: !a.assertion) config.assertions);
    };
  draft = "/var/lib/models/draft.gguf";
in
{
  ours = found (host "orinllm" draft);
  other = found (host "llama-cpp" draft);
  none = found (host "orinllm" null);
  folder = (found (host "orinllm" "/var/lib/models/")).failed;
  space = (found (host "orinllm" "/var/lib/my draft.gguf")).failed;
}
"""


def plain(command: str) -> str:
    """A command without its quotes."""
    return command.replace('"', "").replace("'", "")


def test_the_server_is_told_and_may_read_it(flake: Flake) -> None:
    found = flake("lib.mkOrin", HOST)
    for name, flag in (("ours", "--draft"), ("other", "--model-draft")):
        command, checks = plain(found[name]["command"]), found[name]["pre"]
        assert f" {flag} {DRAFT} " in f"{command} "
        assert found[name]["files"] == ["-/var/lib/models/m.gguf", f"-{DRAFT}"]
        assert len(checks) == 2
        assert f"orin.llm-server.models.m.draftModel {DRAFT}" in plain(checks[1])
        assert not any("draftModel" in message for message in found[name]["failed"])
    assert "draft" not in found["none"]["command"]
    assert (found["none"]["files"], len(found["none"]["pre"])) == ("-/var/lib/models/m.gguf", 1)
    assert any("draftModel" in m and "write a file of the board" in m for m in found["folder"])
    assert any("draftModel" in m and "holds a space" in m for m in found["space"])
