"""The flake's outputs: derivations on both systems, and docs that say what the modules do."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Flake = Callable[..., Any]
ROOT = Path(__file__).resolve().parents[2]
SYSTEMS = ["aarch64-linux", "x86_64-linux"]
PAGES = ("docs/nixos.md", "docs/reference/nixos-checks.md")


def test_an_update_moves_nixpkgs() -> None:
    """`nix flake update` takes an input of an input from the lock of that one, however old."""
    nodes = json.loads((ROOT / "flake.lock").read_text())["nodes"]
    ours = nodes["root"]["inputs"]["nixpkgs"]
    others = [node["inputs"] for name, node in nodes.items() if name != "root" and "inputs" in node]
    assert isinstance(ours, str) and nodes[ours]["original"]["ref"].startswith("nixos-")
    assert all(isinstance(each.get("nixpkgs", []), list) for each in others)


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


@pytest.mark.parametrize("system", SYSTEMS)
def test_tinygrad_is_as_a_reviewer_of_nixpkgs_wants_it(flake: Flake, system: str) -> None:
    """Its tests have derivations, on a Jetson's CUDA too; extras and meta are there."""
    said = flake(
        f"packages.{system}.tinygrad",
        """p: {
          inherit (p.meta) changelog description homepage maintainers platforms;
          license = p.meta.license.spdxId;
          extras = builtins.mapAttrs (_: map (each: each.pname)) p.optional-dependencies;
          tests = builtins.mapAttrs (_: each: each.drvPath) p.tests;
          upstream = p.tests.upstream.buildCommand;
        }""",
    )
    assert said["tests"].keys() == {"cpu", "sm87", "upstream"}
    extras = said["extras"]
    assert set(extras["testing_minimal"]) < set(extras["testing_unit"]) < set(extras["testing"])
    assert {"torch", "gguf"} <= set(extras["testing_unit"])
    assert said["changelog"].startswith(said["homepage"]) and system in said["platforms"]
    assert said["license"] == "MIT" and said["maintainers"] == []
    devices = re.findall(
        r"^DEV=(\w+) python3 -m pytest .* (test/\w+) ", said["upstream"], re.MULTILINE
    )
    assert devices == [("NULL", "test/null"), ("CPU", "test/unit")]


def test_secrets_are_handed_over_anew_and_saved(flake: Flake) -> None:
    """A unit has copies of its secrets: a signal alone would make it read the old ones again."""
    changed = """host: let
      inherit (host.extendModules { modules = [ {
        orin.llm-server.apiKeyFile = "/var/lib/secrets/llm-keys";
        orin.llm-server.metricsKeyFile = "/var/lib/secrets/llm-metrics-key";
        orin.llm-server.host = "192.168.1.20";
        orin.llm-server.environment.SHARE = "50%";
        orin.backup = { enable = true; repository = "/mnt/usb/orin"; };
        orin.telemetry.exporter.webConfigFile = "/var/lib/secrets/web.yml";
        orin.telemetry.exporter.fastRails = true;
      } ]; }) config;
      pick = name: { inherit (config.systemd.services.${name}.serviceConfig)
        ExecReload RefreshOnReload LoadCredential; };
    in {
      server = pick "orin-llm-server-main";
      exporter = pick "jetson-exporter";
      rails = config.services.udev.extraRules;
      saved = config.services.restic.backups.orin.paths;
      share = config.systemd.services.orin-llm-server-main.environment.SHARE;
      limit = config.systemd.services.orin-llm-server-main.startLimitIntervalSec;
    }"""
    said = flake("nixosConfigurations.orin-llm", changed)
    assert 'ATTR{name}=="ina3221", ATTR{update_interval}="0"' in said.pop("rails")
    assert {"/var/lib/secrets/llm-keys", "/var/lib/secrets/llm-metrics-key"} <= {*said.pop("saved")}
    # systemd expands % in variables, too.
    assert said.pop("share") == "50%%"
    # An address of the network's may come late: without end.
    assert said.pop("limit") == 0
    for unit in said.values():
        assert unit["ExecReload"].endswith("/bin/kill -HUP $MAINPID")
        assert unit["RefreshOnReload"] == "credentials" and unit["LoadCredential"]


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


@pytest.mark.parametrize(
    ("folder", "is_git"), [(".", True), ("engine/orinllm", True), (".", False)]
)
def test_an_edit_counts_in_the_shell(tmp_path: Path, folder: str, is_git: bool) -> None:
    """`nix develop` finds its flake from any folder of a checkout, and runs the hook there."""
    (hook,) = re.findall(
        r"shellHook = ''\n(.*?)'';", (ROOT / "shells/all.nix").read_text(), re.DOTALL
    )
    for package in ("benchmarks/orinbench", "engine/orinllm"):
        (tmp_path / package).mkdir(parents=True)
        (tmp_path / package / "__init__.py").write_text("EDITED = True\n")
    if is_git:
        subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    hook = hook.replace("''$", "$")
    program = f"{hook}\n{sys.executable} -c 'import orinllm; orinllm.EDITED'"
    subprocess.run(["bash", "-euc", program], cwd=tmp_path / folder, check=True)


def test_what_the_check_runs_is_all_in_its_sandbox() -> None:
    """A module of tests that imports one of another room would end the whole check."""
    package = (ROOT / "overlays/tinygrad-orin.nix").read_text()
    rooms = re.findall(r"\.\./tests/(\w+)\n", package)
    texts = [path.read_text() for room in rooms for path in (ROOT / "tests" / room).rglob("*.py")]
    imported = re.findall(r"^ *from tests\.(\w+)", "".join(texts), re.MULTILINE)
    assert rooms and set(imported) == set(rooms)


def test_each_host_has_a_derivation_of_its_own(flake: Flake) -> None:
    hosts = flake(
        "nixosConfigurations", "builtins.mapAttrs (_: h: h.config.system.build.toplevel.drvPath)"
    )
    assert hosts.keys() == {"orin", "orin-minimal", "orin-llm"}
    assert len(set(hosts.values())) == 3


def test_a_host_of_networkd_reads_the_installers_wifi(flake: Flake) -> None:
    """Nothing is forced on one with NetworkManager or iwd, and all of them have a system."""
    said = flake(
        "nixosConfigurations.orin-minimal",
        """h: map (more: let
          networking = { useNetworkd = true; } // more;
          inherit (h.extendModules { modules = [ { inherit networking; } ]; }) config;
          bad = builtins.filter (each: !each.assertion) config.assertions;
        in {
          bad = map (each: each.message) bad;
          reads = config.networking.wireless.allowAuxiliaryImperativeNetworks;
          runs = config.systemd.services.wpa_supplicant.serviceConfig.ExecStartPre or [ ] != [ ];
        }) [ { } { networkmanager.enable = true; } { wireless.iwd.enable = true; } ]""",
    )
    assert [each["bad"] for each in said] == [[], [], []]
    assert [each["reads"] for each in said] == [True, False, False]
    assert said[0]["runs"]


def test_one_option_makes_a_host_of_jetpack_7(flake: Flake) -> None:
    """Its kernel, CUDA, llama.cpp and kernels made ahead are of L4T r39; nothing refuses it."""
    said = flake(
        "nixosConfigurations.orin-minimal",
        """h: let seven = h.extendModules { modules = [ {
          hardware.nvidia-jetpack.majorVersion = "7";
          orin.performance.enable = true;
          orin.telemetry.enable = true;
          orin.llm-server = { enable = true; models.main.file = "/var/lib/models/model.gguf"; };
        } ]; }; in map (host: {
          cuda = host.pkgs.cudaPackages.cudaMajorMinorVersion;
          l4t = host.pkgs.nvidia-jetpack.l4tMajorMinorPatchVersion;
          derivations = [
            host.config.system.build.toplevel.drvPath
            host.pkgs.llama-cpp-orin.drvPath
            (host.pkgs.orinllm-cubins.ofShape { shape = "1b"; quant = "Q6_K"; }).drvPath
          ];
        }) [ h seven ]""",
    )
    assert [(host["cuda"], host["l4t"]) for host in said] == [
        ("12.6", "36.5.0"),
        ("13.2", "39.2.0"),
    ]
    assert not set(said[0]["derivations"]) & set(said[1]["derivations"])


def test_a_host_as_shipped_is_shut_and_opens_for_keys_alone(flake: Flake) -> None:
    """One port, of ssh; every other service on the loopback; no password anywhere."""
    said = flake(
        "nixosConfigurations.orin-llm.config",
        """c: {
          firewall = {
            inherit (c.networking.firewall) enable allowedTCPPorts allowedUDPPorts;
            ranges = c.networking.firewall.allowedTCPPortRanges;
          };
          ssh = builtins.intersectAttrs {
            PasswordAuthentication = 1; KbdInteractiveAuthentication = 1; PermitRootLogin = 1;
          } c.services.openssh.settings;
          addresses = {
            grafana = c.services.grafana.settings.server.http_addr;
            prometheus = c.services.prometheus.listenAddress;
            node = c.services.prometheus.exporters.node.listenAddress;
          };
          exporter = c.systemd.services.jetson-exporter.serviceConfig.ExecStart;
          server = c.systemd.services.orin-llm-server-main.serviceConfig.ExecStart;
          passwords = builtins.filter (user: user.hashedPassword or null != null
            || user.password or null != null || user.initialPassword or null != null
            || user.initialHashedPassword or null != null) (builtins.attrValues c.users.users);
          keys = builtins.mapAttrs (_: user: user.openssh.authorizedKeys.keys)
            { inherit (c.users.users) root orin; };
          wheel = c.users.users.orin.extraGroups;
          rescue = c.systemd.services."serial-getty@ttyTCU0".serviceConfig.ExecStart or null;
          folders = builtins.filter (rule: builtins.match ".*/var/lib/.*" rule != null)
            c.systemd.tmpfiles.rules;
        }""",
    )
    mdns = 5353
    assert said["firewall"] == {
        "enable": True,
        "allowedTCPPorts": [22],
        "allowedUDPPorts": [mdns],
        "ranges": [],
    }
    assert said["ssh"] == {
        "PasswordAuthentication": False,
        "KbdInteractiveAuthentication": False,
        "PermitRootLogin": "prohibit-password",
    }
    assert set(said["addresses"].values()) == {"127.0.0.1"}
    assert "--listen 127.0.0.1:9401" in said["exporter"]
    assert "--host 127.0.0.1" in said["server"]
    assert said["passwords"] == [] and said["rescue"] is None
    site = re.findall(r'"(ssh-\S+ [^"]+)"', (ROOT / "nixos/hosts/site.nix").read_text())
    assert said["keys"] == {"root": site, "orin": site} and said["wheel"] == ["wheel"]
    assert "d /var/lib/models 0755 orin users -" in said["folders"]


def test_a_host_that_shares_packages_may_not_want_others(flake: Flake) -> None:
    """Else its overlay, or the packages of its module, would be dropped in silence."""
    sharing = "nixosConfigurations.orin"
    other = "{ lib, ... }: { hardware.nvidia-jetpack.som = lib.mkForce %s; }"
    wrong = """h: map (r: r.message) (builtins.filter (r: !r.assertion)
        (h.extendModules { modules = [ (%s) ]; }).config.assertions)"""
    assert flake(sharing, wrong % (other % '"orin-agx"')) == []
    (message,) = flake(sharing, wrong % (other % '"orin-nx"'))
    assert message.startswith("host orin: hardware.nvidia-jetpack is not that of orin-minimal")
    overlay = "{ nixpkgs.overlays = [ (final: prev: { }) ]; }"
    with pytest.raises(AssertionError, match=r"host orin: nixpkgs\.overlays has one"):
        flake(sharing, wrong % overlay)


def test_a_stranger_s_host_and_the_fleet_have_nothing_wrong(flake: Flake) -> None:
    assert flake("checks.x86_64-linux.foreign-host.report") == []
    assert flake("checks.x86_64-linux.templates.report.wrong") == []
    hive = flake("checks.x86_64-linux.templates.report.hive")
    assert sorted(hive) == flake("checks.x86_64-linux.templates.report.alone")
    assert hive.pop("monitor") == {"targetHost": "monitor.local", "tags": ["monitor"]}
    for name, deployment in hive.items():
        assert deployment.pop("tags") == ["bench" if name == "orin-1" else "llm"]
        assert deployment == {"buildOnTarget": True, "targetHost": f"{name}.local"}
    assert len(hive) == 3


def test_wrong_use_says_what_it_should_and_no_more(flake: Flake) -> None:
    """Each message stands on the generated page; two of them have several mistakes."""
    hosts = flake("checks.x86_64-linux.wrong-use.report")
    assert hosts.pop("nxSuper") == [] and all(hosts.values())
    times = Counter(message for messages in hosts.values() for message in messages)
    for message in times:
        assert message.startswith("host board: ") and "\n" not in message, message
    again = {message.split(" = ")[0]: n for message, n in times.items() if n > 1}
    prometheus = "host board: orin.telemetry.prometheus."
    assert sorted(again.values()) == [2, 3] and all(name.startswith(prometheus) for name in again)
    assert len(times) == 158


def test_a_type_refuses_what_no_value_can_be(flake: Flake) -> None:
    said = flake(
        "nixosConfigurations.orin-minimal.options.orin",
        'o: map o.performance.cpuGovernor.type.check [ null "schedutil" "fast" ]',
    )
    assert said == [True, True, False]


def test_the_pages_name_options_that_there_are(flake: Flake) -> None:
    options = flake("legacyPackages.x86_64-linux.optionsDoc.optionsNix", "builtins.attrNames")
    pages = "".join((ROOT / page).read_text() for page in PAGES)
    for name in re.findall(r"`(orin\.[\w.<>-]+)`", pages.replace(".NAME.", ".<name>.")):
        assert any(option.startswith(name) for option in options), name


def test_the_installer_and_the_flashing_scripts_have_derivations(flake: Flake) -> None:
    """They are no part of `nix flake check`: each takes as long as a whole machine."""
    image, cross = (
        flake(f"legacyPackages.x86_64-linux.{name}.drvPath")
        for name in ("installer", "installer-cross")
    )
    # A derivation that is cross-compiled ends with its platform's name.
    assert all("-orin-installer.iso" in each for each in (image, cross)) and image != cross
    boards = flake("lib.flashScripts", "builtins.attrNames")
    assert {"orin-agx-devkit", "orin-nx-devkit", "orin-nano-super-devkit"} <= set(boards)
    assert not [board for board in boards if "jp5" in board or "xavier-" in board]
    # That there is no such firmware is known only once it is evaluated.
    assert "orin-nx-xavierNxDevkit" in boards and "orin-nx-xavierNxDevkit-jp7" not in boards
    for board in ("orin-agx-devkit", "orin-nano-super-devkit-jp7"):
        script = flake(f"lib.flashScripts.{board}.drvPath")
        assert script.endswith(f"{board.replace('-super', '').removesuffix('-jp7')}.drv")


def test_nobody_becomes_root_or_the_author_of_an_upgrade_by_a_default(flake: Flake) -> None:
    """Whom Nix trusts is root; a template's address that nobody edited may be anybody's."""
    said = flake(
        "nixosConfigurations.orin-minimal",
        """h: let
          with_ = module: (h.extendModules { modules = [ module ]; }).config;
          trusted = module: (with_ module).nix.settings.trusted-users;
          checks = flake: (with_ { orin.upgrade = { enable = true; inherit flake; }; }
            ).system.preSwitchChecks.orinUpgrade or null;
        in {
          keys = trusted { };
          password = trusted { users.users.orin.hashedPasswordFile = "/var/lib/secrets/orin"; };
          template = checks "github:replace-me/my-orins";
          own = checks "github:ada/my-orins";
          ssh = map (module: (with_ module).orin.upgrade.ssh) [
            { services.openssh.ports = [ 2222 ]; }
            { services.openssh.openFirewall = false; }
          ];
        }""",
    )
    assert said["keys"] == ["root", "orin"] and said["password"] == ["root"]
    assert "exit 1" in said["template"] and said["own"] is None
    # Where one interface alone may ask, the check of an upgrade cannot.
    assert said["ssh"] == [2222, None]
    fleet = (ROOT / "templates/fleet/common.nix").read_text()
    assert re.findall(r'flake = "(\S+)"', fleet) == ["github:replace-me/my-orins"]
    for name in ("default", "fleet"):
        # GitHub gives nobody a name with an underscore.
        text = (ROOT / f"templates/{name}/flake.nix").read_text()
        assert re.findall(r'"github:([^/"]+)', text) == ["REPLACE_ME"]
