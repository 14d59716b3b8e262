"""A tuning file in a host's configuration: where it goes, who imports it, what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Flake = Callable[..., Any]
ROOT = Path(__file__).resolve().parents[2]

HOST = """
mkOrin:
let
  file = level: format: builtins.toFile "tuning.json" (builtins.toJSON {
    inherit format;
    entries = map (level: { inherit level; }) level;
  });
  host = settings: (mkOrin {
    hostName = "board";
    modules = [
      {
        orin.tinygrad = { enable = true; } // settings;
        orin.llm-server.enable = true;
        orin.llm-server.models.m = { file = "/var/lib/models/m.gguf"; context = 2048; };
      }
    ];
  }).config;
  service = config: config.systemd.services.orin-llm-server-m;
  pre = config: map toString (service config).serviceConfig.ExecStartPre;
  failed = config: map (a: a.message) (builtins.filter (a: !a.assertion) config.assertions);
  tuned = host { tuning = file [ 2 2 ] "tinygrad-orin tuning 1"; };
  plain = host { };
in
{
  pre = pre tuned;
  level = (service tuned).environment.JITBEAM or null;
  etc = tuned.environment.etc ? "tinygrad-orin/tuning.json";
  plainPre = builtins.length (pre plain) == 1;
  plainLevel = (service plain).environment.JITBEAM or null;
  mixed = failed (host { tuning = file [ 2 4 ] "tinygrad-orin tuning 1"; });
  other = failed (host { tuning = file [ 2 ] "something else"; });
}
"""


def test_the_server_imports_the_file_before_it_starts(flake: Flake) -> None:
    found = flake("lib.mkOrin", HOST)
    check, tune = found["pre"]
    assert "check_model.py" in check
    assert tune.startswith("-/nix/store/") and "/bin/orinbench tune import" in tune
    assert tune.endswith("/var/lib/models/m.gguf --context 2048 --once")
    assert found["level"] == "2" and found["etc"]
    assert found["plainPre"] and found["plainLevel"] is None
    for messages in (found["mixed"], found["other"]):
        assert any("orin.tinygrad.tuning is no file of one BEAM level" in m for m in messages)


def test_the_command_that_the_service_runs_exists() -> None:
    """Its flags are those of `orinbench tune import`."""
    from orinbench.tune.command import import_command

    flags = {flag for parameter in import_command.params for flag in parameter.opts}
    text = (ROOT / "nixos" / "modules" / "tinygrad.nix").read_text()
    assert {"--context", "--once"} <= flags and '"--once"' in text and '"import"' in text
    assert json.dumps("tinygrad-orin tuning 1") in text
