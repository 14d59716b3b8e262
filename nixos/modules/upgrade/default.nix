# Upgrades by themselves, and back again where the new system does not work.
{
  config,
  lib,
  pkgs,
  ...
}:
let
  cfg = config.orin.upgrade;
  inherit (import ../common { inherit lib config; }) check option switch;
  # Of our units, those that this host has.
  ours =
    lib.splitString " " "orin-gpu orin-performance-readback jetson-exporter prometheus grafana sshd"
    ++ map (name: "orin-llm-server-${name}") (lib.attrNames (config.orin.llm-server.models or { }));
  llm = config.orin.llm-server or { enable = false; };
  slowest = if llm.enable then llm.startTimeout else 0;
  folder = lib.fileset.toSource {
    root = ./.;
    fileset = lib.fileset.unions [
      ./reachable.py
      ./upgrade.py
    ];
  };
  inherit (config.boot.loader) efi systemd-boot;
  sshPorts =
    config.services.openssh.ports
    ++ lib.filter (port: port != null) (
      map (each: each.port) (config.services.openssh.listenAddresses or [ ])
    );
  # A port that one interface alone has is shut for the check, whose packets come by one of its own.
  isOpen =
    port:
    let
      inherit (config.networking) firewall;
      within = range: range.from <= port && port <= range.to;
    in
    !firewall.enable
    || lib.elem port firewall.allowedTCPPorts
    || lib.any within (firewall.allowedTCPPortRanges or [ ]);
  # No number at its end: that would be an address with a mistake.
  name = "([A-Za-z0-9-]+\\.)*[A-Za-z][A-Za-z0-9-]*\\.?";
  port = "([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])";
  program = "${lib.getExe pkgs.python3} ${folder}/upgrade.py";
  esp = "--esp ${efi.efiSysMountPoint}";
  # Restarts a board that nobody looks at, instead of a shell that nobody may log into.
  restart = after: {
    description = "Restart: nobody looks at this board's console";
    wantedBy = [ "emergency.target" ];
    unitConfig.DefaultDependencies = false;
    unitConfig.SuccessAction = "reboot-force";
    unitConfig.FailureAction = "reboot-force";
    serviceConfig.Type = "oneshot";
    serviceConfig.ExecStart = "${after}/bin/sleep 30";
  };
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
      defaultText = lib.literalMD "the GPU's test, the readback, telemetry, ssh and the servers that are on";
      example = [ "orin-llm-server-main.service" ];
      description = ''
        Units that are up on a system that works. Where one is not after an upgrade, the board goes
        back to the last generation that passed: at once, or by a restart where the kernel differs.
        A generation passes after a boot of its own, and no earlier.
      '';
    };

    ssh = lib.mkOption {
      type = lib.types.nullOr lib.types.port;
      default = if config.services.openssh.enable then lib.findFirst isOpen null sshPorts else null;
      defaultText = lib.literalMD "the first port of ssh that the firewall opens on every interface, or null";
      example = 2222;
      description = ''
        The port that answers as ssh on a system that works, at an address of this board, through its
        firewall: it is asked from a network namespace of its own. null: it is not asked.
      '';
    };

    peer =
      option
        (lib.types.nullOr (
          lib.types.strMatching "(${check.ipv4}|${name})(:${port})?|[0-9a-f:]*:[0-9a-f:]*:[0-9a-f:.]*"
        ))
        null
        "nas.local:445"
        "A machine that a working board reaches: HOST by ping, or HOST:PORT by TCP.";

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
          !lib.hasSuffix ".service" unit
          || config.systemd.services ? ${lib.removeSuffix ".service" unit}
          # One of a template's.
          || config.systemd.services ? "${lib.head (lib.splitString "@" unit)}@"
        ) cfg.units)
        "this host has not all of these, and every upgrade would be undone; leave the option out for those that it has"
      )
      (check.rule "orin.upgrade.units" cfg.units
        (
          !lib.any (check.matches "(nixos-upgrade|orin-(restart|upgrade-check|upgrade-deadline))\\.service") cfg.units
        )
        "the check cannot wait for itself, for what started it, or for what restarts a board; leave these out"
      )
      (check.rule "orin.upgrade.ssh" cfg.ssh
        (cfg.ssh == null || !config.services.openssh.enable || lib.elem cfg.ssh sshPorts)
        "ssh listens on ${toString sshPorts} here, and every upgrade would be undone; write one of these, or null"
      )
      (check.rule "orin.upgrade.peer" cfg.peer (
        cfg.peer == null
        || !check.matches "(localhost|127\\..*|::1?|0\\.0\\.0\\.0|${config.networking.hostName}(\\.local)?)(:[0-9]+)?" cfg.peer
      ) ''this board always reaches itself; name another machine, as in "nas.local:445"'')
      (check.calendar "orin.upgrade.dates" cfg.dates)
      (check.noPassword "orin.upgrade.flake" cfg.flake "give root an ssh key, or Nix a `netrc-file`")
      (check.rule "orin.upgrade.flake" cfg.flake
        (
          check.matches "(/|[a-z][a-z0-9+]*:)[^[:space:]]+" cfg.flake
          && !check.matches "(github|gitlab|sourcehut):[^/]*/?" cfg.flake
          && !lib.hasInfix builtins.storeDir cfg.flake
        )
        ''write a path from the root or an address, outside the Nix store, which never changes, as in "/etc/nixos" or "github:me/my-orins"''
      )
      (check.rule "orin.upgrade.timeout" cfg.timeout (cfg.timeout >= slowest)
        "a server may take ${toString slowest} seconds to start (`orin.llm-server.startTimeout`), and the upgrade would be undone before; write that or more"
      )
    ];

    # An address that nobody has edited is somebody else's to fill.
    system.preSwitchChecks.orinUpgrade = lib.mkIf (lib.hasInfix "replace-me" cfg.flake) ''
      echo "orin.upgrade.flake still holds replace-me: write where your flake is."
      exit 1
    '';
    system.autoUpgrade = {
      enable = true;
      flake = lib.mkDefault cfg.flake;
      dates = lib.mkDefault cfg.dates;
      allowReboot = lib.mkDefault cfg.reboot;
      # It is for channels.
      upgrade = lib.mkDefault false;
    };
    warnings = lib.optional (!systemd-boot.enable) (
      "host ${config.networking.hostName}: orin.upgrade.enable: only systemd-boot counts tries: a "
      + "generation that does not start stays; set `boot.loader.systemd-boot.enable = true`"
    );
    boot = {
      # After each installation of the boot loader, whoever asked for it.
      loader.systemd-boot.extraInstallCommands = "${program} arm ${esp} \"$1\"\n";
      # A kernel that stops starts again, and so does one that only says that it should.
      kernelParams = [ "panic=10" ];
      kernel.sysctl."kernel.panic_on_oops" = lib.mkDefault 1;
      initrd.systemd = {
        # No root file system after five minutes: another try, or the last good system.
        targets.initrd.unitConfig = {
          JobTimeoutSec = lib.mkDefault 300;
          JobTimeoutAction = lib.mkDefault "reboot-force";
        };
        services.orin-restart = restart "";
      };
    };
    # The SoC's own watchdog restarts a board whose PID 1 stops.
    systemd.settings.Manager = {
      RuntimeWatchdogSec = lib.mkDefault "60s";
      RebootWatchdogSec = lib.mkDefault "5min";
    };
    systemd.timers.orin-upgrade-deadline = {
      description = "A boot comes to a decision about this system";
      wantedBy = [ "sysinit.target" ];
      unitConfig.DefaultDependencies = false;
      timerConfig.OnBootSec = 2 * cfg.timeout + 120;
    };
    systemd.services = {
      orin-restart = lib.mkIf (!config.orin.host.rescueLogin or false) (restart pkgs.coreutils);
      orin-upgrade-deadline = {
        description = "No decision about this system: restart, and spend one of its tries";
        unitConfig.DefaultDependencies = false;
        path = [ config.systemd.package ];
        serviceConfig.Type = "oneshot";
        # A program that does not even start leaves the count of this system's tries, if they are counted.
        serviceConfig.ExecStart = "${pkgs.runtimeShell} -c '${program} deadline ${esp} || { grep -qsF \"init=$$(readlink -f /run/booted-system)/init\" ${efi.efiSysMountPoint}/loader/entries/orin-next+*.conf && systemctl --force reboot; }'";
      };
      nixos-upgrade.serviceConfig = {
        # A download that hangs is given up; the next night tries again.
        TimeoutStartSec = lib.mkDefault "12h";
        ExecStartPre = [ "${program} began" ];
        # A switch that leaves a failed unit behind is a failed upgrade: that one above all is checked.
        ExecStopPost = [
          # Whatever becomes of it, the check follows.
          "-${program} ended"
          "${config.systemd.package}/bin/systemctl start --no-block orin-upgrade-check.service"
        ];
      };
      # At each boot, too: a new kernel is checked after the restart that it needs.
      orin-upgrade-check = {
        description = "This system works, or the board goes back to the last that did";
        wantedBy = [ "multi-user.target" ];
        after = [ "network-online.target" ];
        wants = [ "network-online.target" ];
        # The switch back stops and starts units; this one goes on.
        restartIfChanged = false;
        unitConfig.X-StopOnRemoval = false;
        path = [
          config.systemd.package
          pkgs.coreutils
          pkgs.iproute2
          pkgs.iputils
        ];
        serviceConfig = {
          Type = "oneshot";
          # Killed, as where memory runs out, or ended by a fault: what comes to no decision lets everything pass.
          Restart = "on-failure";
          RestartSec = 30;
          RestartPreventExitStatus = 3;
          ExecStart = lib.concatStringsSep " " (
            [ "${program} check ${esp} --seconds ${toString cfg.timeout}" ]
            ++ lib.optional (cfg.ssh != null) "--ssh ${toString cfg.ssh}"
            ++ lib.optional (cfg.peer != null) "--peer ${cfg.peer}"
            ++ [ (lib.escapeShellArgs cfg.units) ]
          );
          StateDirectory = "orin-upgrade";
        };
      };
    };
  };
}
