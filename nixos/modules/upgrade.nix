# Upgrades by themselves, and back again where the new system does not work.
{
  config,
  lib,
  pkgs,
  ...
}:
let
  cfg = config.orin.upgrade;
  inherit (import ./common.nix { inherit lib config; }) check option switch;
  # Of our units, those that this host has.
  ours = [
    "orin-gpu"
    "orin-performance-readback"
    "jetson-exporter"
    "prometheus"
    "grafana"
  ]
  ++ map (name: "orin-llm-server-${name}") (lib.attrNames (config.orin.llm-server.models or { }));
  llm = config.orin.llm-server or { enable = false; };
  slowest = if llm.enable then llm.startTimeout else 0;
  program = "${lib.getExe pkgs.python3} ${./upgrade.py}";
in
{
  options.orin.upgrade = {
    enable = lib.mkEnableOption "upgrades by themselves, with a way back";

    flake =
      option lib.types.str "/etc/nixos" "github:me/my-orins"
        "The flake that has this host, by its name.";

    dates = option lib.types.str "04:40" "Sun 03:00" "When, as systemd.time(7) writes it.";

    reboot = switch false "Whether to restart for a new kernel. false: it waits for the next restart.";

    units = lib.mkOption {
      type = lib.types.listOf lib.types.str;
      default = map (name: "${name}.service") (lib.filter (name: config.systemd.services ? ${name}) ours);
      defaultText = lib.literalMD "the GPU's test, the readback, telemetry and the servers that are on";
      example = [ "orin-llm-server-main.service" ];
      description = ''
        Units that are up on a system that works. Where one is not after an upgrade, the board goes
        back to the last generation that passed: at once, or by a restart where the kernel differs.
      '';
    };

    timeout =
      option lib.types.ints.positive 1200 300
        "Seconds that the units have; servers compile kernels at their first start.";
  };

  config = lib.mkIf cfg.enable {
    assertions = [
      (check.rule "orin.upgrade.units" cfg.units (
        cfg.units != [ ] && lib.all (check.matches "[^[:space:]]+\\.[a-z]+") cfg.units
      ) ''name at least one unit, with its ending, as in "orin-gpu.service"'')
      (check.rule "orin.upgrade.units" cfg.units
        (lib.all (
          unit:
          !lib.hasPrefix "orin-" unit
          || !lib.hasSuffix ".service" unit
          || config.systemd.services ? ${lib.removeSuffix ".service" unit}
        ) cfg.units)
        "this host has not all of these, and every upgrade would be undone; leave the option out for those that it has"
      )
      (check.rule "orin.upgrade.units" cfg.units (
        lib.intersectLists cfg.units [
          "nixos-upgrade.service"
          "orin-upgrade-check.service"
        ] == [ ]
      ) "the check cannot wait for itself or for what started it; leave these out")
      (check.calendar "orin.upgrade.dates" cfg.dates)
      (check.rule "orin.upgrade.flake" cfg.flake
        (
          check.matches "(/|[a-z][a-z0-9+]*:)[^[:space:]]+" cfg.flake
          && !lib.hasInfix builtins.storeDir cfg.flake
        )
        ''write a path from the root or an address, outside the Nix store, which never changes, as in "/etc/nixos" or "github:me/my-orins"''
      )
      (check.rule "orin.upgrade.timeout" cfg.timeout (cfg.timeout >= slowest)
        "a server may take ${toString slowest} seconds to start (`orin.llm-server.startTimeout`), and the upgrade would be undone before; write that or more"
      )
    ];

    system.autoUpgrade = {
      enable = true;
      flake = lib.mkDefault cfg.flake;
      dates = lib.mkDefault cfg.dates;
      allowReboot = lib.mkDefault cfg.reboot;
      # It is for channels.
      upgrade = lib.mkDefault false;
    };
    systemd.services = {
      nixos-upgrade.serviceConfig = {
        ExecStartPre = [ "${program} began" ];
        # A switch that leaves a failed unit behind is a failed upgrade: that one above all is checked.
        ExecStopPost = [
          "${program} ended"
          "${config.systemd.package}/bin/systemctl start --no-block orin-upgrade-check.service"
        ];
      };
      # At each boot, too: a new kernel is checked after the restart that it needs.
      orin-upgrade-check = {
        description = "This system works, or the board goes back to the last that did";
        wantedBy = [ "multi-user.target" ];
        # The switch back stops and starts units; this one goes on.
        restartIfChanged = false;
        stopIfChanged = false;
        unitConfig.X-StopOnRemoval = false;
        path = [
          config.nix.package
          config.systemd.package
        ];
        serviceConfig = {
          Type = "oneshot";
          ExecStart = "${program} check --seconds ${toString cfg.timeout} ${lib.escapeShellArgs cfg.units}";
          StateDirectory = "orin-upgrade";
        };
      };
    };
  };
}
