"""A host's evaluation, kept in `recorded/`, so that machines without Nix can start it.

    NIX="nix" .venv/bin/python -m tests.nixos.recorded

evaluates `nixosConfigurations.orin-llm` and writes the folder anew; a test compares the two
wherever Nix is. Hashes and versions of the store are left out: a new nixpkgs changes nothing here.
"""

import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FOLDER = HERE / "recorded"
#: In recorded units every folder of the store is this one.
STORE = "/nix/store/any"
UNITS = (
    "jetson-exporter.service",
    "jetson-exporter-debugfs.service",
    "jetson_clocks.service",
    "harmonia.service",
    "harmonia.socket",
    "nixos-upgrade.service",
    "nvidia-container-toolkit-cdi-generator.service",
    "nvpmodel.service",
    "orin-cache-key.service",
    "orin-gpu.service",
    "orin-grafana-secrets.service",
    "orin-llm-server-main.service",
    "orin-performance-readback.service",
    "orin-restart.service",
    "orin-upgrade-check.service",
    "orin-upgrade-deadline.service",
    "orin-upgrade-deadline.timer",
    "prometheus.service",
    "prometheus-node-exporter.service",
    "restic-backups-orin.service",
)
#: Scripts and a list that these units name in the store, by the names that they have there.
SCRIPTS = (
    "backupPrepareCommand",
    "nixos-upgrade-start",
    "orin-cache-key-start",
    "orin-grafana-secrets-start",
    "boot-loader",
    "restic-backups-orin-post-stop",
    "restic-backups-orin-pre-start",
    "staticPaths",
)
#: disko's script of the installer.
DISK = "disk.sh"
EXPRESSION = """
names: host: let
  inherit (host.extendModules {
    modules = [
      {
        orin.telemetry.exporter.debugfs.enable = true;
        orin.upgrade.enable = true;
        orin.cache.enable = true;
        virtualisation.podman.enable = true;
        hardware.nvidia-container-toolkit.enable = true;
        orin.backup = {
          enable = true;
          repository = "/srv/backup";
          passwordFile = "/var/lib/secrets/backup";
        };
      }
    ];
  }) config;
  p = config.services.prometheus;
  inherit (config.systemd) services;
  backup = config.services.restic.backups.orin;
in {
  scripts = {
    backupPrepareCommand = backup.backupPrepareCommand;
    nixos-upgrade-start = services.nixos-upgrade.script;
    boot-loader = config.boot.loader.systemd-boot.extraInstallCommands;
    orin-cache-key-start = services.orin-cache-key.script;
    orin-grafana-secrets-start = services.orin-grafana-secrets.script;
    restic-backups-orin-post-stop = services.restic-backups-orin.postStop;
    restic-backups-orin-pre-start = services.restic-backups-orin.preStart;
    staticPaths = builtins.concatStringsSep "\n" backup.paths + "\n";
  };
  units = builtins.listToAttrs (map
    (name: { inherit name; value = config.systemd.units.${name}.text; })
    (builtins.fromJSON names));
  prometheus = {
    global = p.globalConfig;
    rule_files = map (file: baseNameOf file) p.ruleFiles;
    scrape_configs = map (job: { inherit (job) job_name static_configs; }) p.scrapeConfigs;
  };
}
"""


def generic(text: str) -> str:
    """Write a unit's text without the hashes and versions of the Nix store."""
    text = re.sub(r"/nix/store/[0-9a-z]{32}-[^/\s\"':;]+/", f"{STORE}/", text)
    text = re.sub(r"/nix/store/[0-9a-z]{32}-", "/nix/store/", text)
    text = re.sub(rf"({STORE}/bin/python3)\.\d+", r"\1", text)
    # Units for the host's shell and clock, no service of ours.
    return re.sub(r'^Environment="(PATH|LOCALE_ARCHIVE|TZDIR)=.*\n', "", text, flags=re.MULTILINE)


def without_null(value: Any) -> Any:
    """NixOS leaves options that are null out of the file."""
    if isinstance(value, dict):
        return {k: without_null(v) for k, v in value.items() if v is not None and k != "_module"}
    if isinstance(value, list):
        return [without_null(item) for item in value]
    return value


def evaluated(flake: Callable[[str, str], Any]) -> dict[str, str]:
    """The files that `recorded/` should hold, by name; `flake(attribute, apply)` evaluates."""
    disk = flake("legacyPackages.x86_64-linux.installerDisk", "d: d.content")
    names = json.dumps(json.dumps(UNITS))
    said = flake("nixosConfigurations.orin-llm", f"({EXPRESSION}) {names}")
    prometheus = without_null(said["prometheus"])
    # In the store a file's name has its hash in front.
    prometheus["rule_files"] = [name.split("-", 1)[-1] for name in prometheus["rule_files"]]
    files = {name: generic(text) for name, text in said["units"].items()}
    files |= {f"{name}.sh": generic(text) for name, text in said["scripts"].items()}
    files[DISK] = generic(disk)
    gateway = flake("checks.x86_64-linux.templates.report.litellm", "each: each")
    others = {"prometheus.json": prometheus, "litellm.json": gateway}
    return files | {
        name: json.dumps(value, indent=2, sort_keys=True) + "\n" for name, value in others.items()
    }


def recorded() -> dict[str, str]:
    """The files of `recorded/`, by name."""
    return {path.name: path.read_text() for path in FOLDER.iterdir()}


def units() -> dict[str, str]:
    """The units among them."""
    return {name: text for name, text in recorded().items() if name in UNITS}


def _nix(attribute: str, apply: str) -> Any:
    nix = shlex.split(os.environ.get("NIX", "nix"))
    features = ["--extra-experimental-features", "nix-command flakes"]
    command = [*nix, "eval", *features, "--json", f".#{attribute}", "--apply", apply]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in evaluated(_nix).items():
        (FOLDER / name).write_text(text)
