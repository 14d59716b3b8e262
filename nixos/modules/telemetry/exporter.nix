# The board's own exporter: what its sensors say, for Prometheus.
{
  config,
  lib,
  pkgs,
  ...
}:
let
  inherit (config.orin) telemetry;
  cfg = telemetry.exporter;
  common = import ../common { inherit lib config; };
  inherit (common) check listening paths;
  inherit (common) option switch;
  secrets = common.secrets {
    files."orin.telemetry.exporter.webConfigFile" = cfg.webConfigFile;
    advice = "its format is that of Prometheus' exporter-toolkit; docs/telemetry.md has an example";
  };

  exporterUnit = description: flags: hardening: {
    inherit description;
    wantedBy = [ "multi-user.target" ];
    # An address of the network may appear later than this unit: it is tried until it is there.
    after = [ "network-online.target" ];
    wants = [ "network-online.target" ];
    startLimitIntervalSec = 0;
    serviceConfig =
      import ../common/hardening.nix { }
      // {
        ExecStart = lib.escapeShellArgs ([ (lib.getExe' cfg.package "jetson-exporter") ] ++ flags);
        Restart = "on-failure";
        RestartSec = 5;
        DynamicUser = true;
        RestrictAddressFamilies = "AF_INET AF_INET6 AF_UNIX";
      }
      // hardening;
  };

  # The exporter has a user of its own: systemd hands it what only root may read.
  webSettings = lib.optionalAttrs (cfg.webConfigFile != null) {
    # The credentials are copies, which systemd 260 and later makes anew before the signal.
    RefreshOnReload = "credentials";
    ExecReload = "${lib.getExe' pkgs.coreutils "kill"} -HUP $MAINPID";
    LoadCredential = [
      "web.yml:${cfg.webConfigFile}"
    ]
    ++ lib.mapAttrsToList (name: file: "${name}:${file}") cfg.webFiles;
  };
in
{
  imports = [ ../common/ports.nix ];

  options.orin.telemetry.exporter = {
    enable = switch true "Whether this machine's sensors are read. false: a monitor that is no Jetson.";

    package = lib.mkPackageOption pkgs "tinygrad-orin" { };

    listenAddress = listening.listenAddress "The exporter's address. Beyond the loopback its readings are open to all.";

    port = listening.port 9401 9500 "The exporter's port.";

    openFirewall = listening.openFirewall "the exporter's port";

    extraFlags =
      option (lib.types.listOf lib.types.str)
        [ ]
        [
          "--sample-rate"
          "20"
        ]
        "Further arguments of `jetson-exporter`; the one for debugfs does not get them.";

    webConfigFile = option (lib.types.nullOr lib.types.str) null "/var/lib/secrets/jetson-web.yml" ''
      A file on the board with TLS and passwords, in the format of Prometheus' exporter-toolkit.
      Root's alone will do; `systemctl reload jetson-exporter` reads it again. Set `scrape` to
      what this board's Prometheus needs then.
    '';

    webFiles = option (lib.types.attrsOf lib.types.str) { } {
      "jetson.crt" = "/var/lib/secrets/jetson.crt";
      "jetson.key" = "/var/lib/secrets/jetson.key";
    } "The files that `webConfigFile` names, by the names that it has for them.";

    fastRails = switch false ''
      Whether the rails' INA3221 converts in 140 µs each (`update_interval` 0) and not in 1.1 ms.
      The chip compares its critical limit with each single conversion, and not with their mean:
      shorter peaks then raise over-current events, for which the board slows itself down.
    '';

    scrape = option lib.types.attrs { } {
      scheme = "https";
      tls_config.ca_file = "/var/lib/prometheus-ca.crt";
      basic_auth = {
        username = "prometheus";
        password_file = "/var/lib/secrets/jetson-password";
      };
    } "What the scrape of the exporter needs besides its address.";

    debugfs = {
      enable = switch false ''
        Whether a second exporter reads the memory clock and the engines from debugfs. It has
        the capability to read every file (`CAP_DAC_READ_SEARCH`), because debugfs is root's.
      '';

      port = listening.port 9402 9501 "The port of the second exporter, on the loopback.";
    };
  };

  config = lib.mkIf (telemetry.enable && cfg.enable) {
    assertions =
      listening.rules "the exporter" "orin.telemetry.exporter" "listenAddress" cfg
      ++ secrets.assertions
      ++ [
        (check.unprivileged "orin.telemetry.exporter.debugfs.port" cfg.debugfs.port)
        (check.rule "orin.telemetry.exporter.extraFlags" cfg.extraFlags
          (lib.all (flag: !check.matches "--(listen|web-config|once)(=.*)?" flag) cfg.extraFlags)
          "an option sets one of these flags, or the exporter would end; leave it out and set `listenAddress`, `port` or `webConfigFile`"
        )
        (check.flags "orin.telemetry.exporter.extraFlags" cfg.extraFlags)
        (check.noSecrets "orin.telemetry.exporter.scrape" cfg.scrape
          "use the setting's twin with _file at its end, as in `password_file`"
        )
        (check.rule "orin.telemetry.exporter.webFiles" (lib.attrNames cfg.webFiles) (
          cfg.webFiles == { } || cfg.webConfigFile != null
        ) "nothing names these files; set `orin.telemetry.exporter.webConfigFile` too")
      ]
      ++ lib.concatLists (
        lib.mapAttrsToList (name: file: [
          (check.rule "orin.telemetry.exporter.webFiles" name (
            name != "web.yml"
          ) "`webConfigFile` itself is handed over by this name; give the file another")
          (check.rule "orin.telemetry.exporter.webFiles" name (check.matches "[A-Za-z0-9_.-]+" name)
            ''write the file's name alone, as the web configuration has it, as in "jetson.key"''
          )
          (paths.secret "orin.telemetry.exporter.webFiles.${check.show name}" file "/var/lib/secrets/${name}")
        ]) cfg.webFiles
      )
      ++ check.absoluteFiles "orin.telemetry.exporter.scrape" cfg.scrape;

    orin.ports = {
      "orin.telemetry.exporter.port" = cfg.port;
    }
    // lib.optionalAttrs cfg.debugfs.enable {
      "orin.telemetry.exporter.debugfs.port" = cfg.debugfs.port;
    };

    systemd.services.jetson-exporter = exporterUnit "Jetson sensors for Prometheus" (
      common.flags {
        listen = listening.socket cfg.listenAddress cfg.port;
        web-config = lib.mapNullable (_: "%d/web.yml") cfg.webConfigFile;
      }
      ++ cfg.extraFlags
    ) webSettings;
    systemd.services.jetson-exporter-debugfs = lib.mkIf cfg.debugfs.enable (
      exporterUnit "Jetson sensors that only root may read"
        (common.flags {
          listen = listening.socket listening.loopback cfg.debugfs.port;
          collectors = "debugfs";
          sample-rate = 0;
        })
        {
          AmbientCapabilities = "CAP_DAC_READ_SEARCH";
          CapabilityBoundingSet = "CAP_DAC_READ_SEARCH";
          # In a user namespace the capability would not count for debugfs.
          PrivateUsers = false;
        }
    );
    services.udev.extraRules = lib.mkIf cfg.fastRails ''
      ACTION=="add", SUBSYSTEM=="hwmon", ATTR{name}=="ina3221", ATTR{update_interval}="0"
    '';
    networking.firewall.allowedTCPPorts = lib.optional cfg.openFirewall cfg.port;
    system.preSwitchChecks = secrets.checks "orinSecrets";
  };
}
