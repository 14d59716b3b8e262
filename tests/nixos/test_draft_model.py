"""A draft model and an mmproj file of a host: what the server is told, and what is refused."""

from collections.abc import Callable
from typing import Any

Flake = Callable[..., Any]
DRAFT = "/var/lib/models/draft.gguf"
MMPROJ = "/var/lib/models/mmproj.gguf"

HOST = """
mkOrin:
let
  host = backend: draftModel: mmproj: (mkOrin {
    hostName = "board";
    modules = [
      {
        orin.llm-server = { inherit backend; enable = true; };
        orin.llm-server.models.m = { file = "/var/lib/models/m.gguf"; inherit draftModel mmproj; };
      }
    ];
  }).config;
  found = config:
    let unit = config.systemd.services.orin-llm-server-m.serviceConfig; in {
      asserted = config.systemd.services.orin-llm-server-m.unitConfig.AssertPathExists;
      command = toString unit.ExecStart;
      files = unit.BindReadOnlyPaths;
      failed = map (a: a.message) (builtins.filter (a: !a.assertion) config.assertions);
    };
  draft = "/var/lib/models/draft.gguf";
  mmproj = "/var/lib/models/mmproj.gguf";
in
{
  ours = found (host "orinllm" draft mmproj);
  other = found (host "llama-cpp" draft mmproj);
  none = found (host "orinllm" null null);
  own = found (host "orinllm" "mtp" null);
  others = (found (host "llama-cpp" "mtp" null)).failed;
  folder = (found (host "orinllm" "/var/lib/models/" "https://example.com/mmproj.gguf")).failed;
  space = (found (host "orinllm" "/var/lib/my draft.gguf" "/var/lib/models/m.gguf")).failed;
}
"""


def plain(command: str) -> str:
    """A command without its quotes."""
    return command.replace('"', "").replace("'", "")


def test_the_server_is_told_and_may_read_it(flake: Flake) -> None:
    found = flake("lib.mkOrin", HOST)
    for name, flag in (("ours", "--draft"), ("other", "--model-draft")):
        command = plain(found[name]["command"])
        assert f" {flag} {DRAFT} " in f"{command} "
        assert f" --mmproj {MMPROJ} " in f"{command} "
        assert found[name]["files"] == ["-/var/lib/models/m.gguf", f"-{DRAFT}", f"-{MMPROJ}"]
        # This project's engine says what is wrong with a model; of llama.cpp's systemd does.
        assert len(found[name]["asserted"]) == (0 if name == "ours" else 3)
        assert not any(" m." in m or ".m." in m for m in found[name]["failed"])
    assert "draft" not in found["none"]["command"] and "mmproj" not in found["none"]["command"]
    assert found["none"]["files"] == ["-/var/lib/models/m.gguf"]
    # A block of the model's own file is no file.
    assert " --draft mtp " in f"{plain(found['own']['command'])} "
    assert found["own"]["files"] == found["none"]["files"]
    assert not any(".m." in m for m in found["own"]["failed"])
    assert any("draftModel" in m and "takes a file here" in m for m in found["others"])
    assert any("draftModel" in m and "ends with a slash" in m for m in found["folder"])
    assert any("draftModel" in m and "holds a space" in m for m in found["space"])
    assert any("m.mmproj" in m and "downloads nothing" in m for m in found["folder"])
    assert any("m.mmproj" in m and "`file` or `draftModel` too" in m for m in found["space"])
