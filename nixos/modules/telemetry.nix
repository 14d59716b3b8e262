# What the board does, in watts, degrees and joules per token: exporter, Prometheus, Grafana.
# Rules and dashboards are the files of ../../telemetry; everything listens on the loopback.
{
  config,
  lib,
  options,
  pkgs,
  ...
}:
let
  line = import ./line.nix lib;
  cfg = config.orin.telemetry;
  host = config.networking.hostName;
  llm = config.orin.llm-server or { enable = false; };
  llmKey = if llm.enable && llm.metrics then llm.metricsKeyFile else null;

  listening = import ./listening.nix { inherit lib; };
  inherit (listening) loopback;
  address = port: "${loopback}:${toString port}";
  check = import ./check.nix { inherit lib host; };
  paths = import ./paths.nix { inherit lib; };
  # Names of jobs that are ours.
  taken = [
    "jetson"
    "jetson-debugfs"
    "node"
    "prometheus"
  ];
  secrets = import ./secrets.nix { inherit lib host; } [
    {
      option = "orin.telemetry.exporter.webConfigFile";
      file = cfg.exporter.webConfigFile;
      advice = "its format is that of Prometheus' exporter-toolkit; docs/telemetry.md has an example";
    }
  ];

  exporterUnit = description: flags: hardening: {
    inherit description;
    wantedBy = [ "multi-user.target" ];
    after = [ "network.target" ];
    serviceConfig =
      import ./hardening.nix { }
      // {
        ExecStart = lib.escapeShellArgs ([ (lib.getExe' cfg.exporter.package "jetson-exporter") ] ++ flags);
        Restart = "on-failure";
        DynamicUser = true;
        RestrictAddressFamilies = [
          "AF_INET"
          "AF_INET6"
          "AF_UNIX"
        ];
      }
      // hardening;
  };

  # The exporter has a user of its own: systemd hands it what only root may read.
  webSettings = lib.optionalAttrs (cfg.exporter.webConfigFile != null) {
    ExecReload = "${lib.getExe' pkgs.coreutils "kill"} -HUP $MAINPID";
    LoadCredential = [
      "web.yml:${cfg.exporter.webConfigFile}"
    ]
    ++ lib.mapAttrsToList (name: file: "${name}:${file}") cfg.exporter.webFiles;
  };
in
{
  imports = [
    ./grafana.nix
    ./ports.nix
  ];

  options.orin.telemetry = {
    enable = lib.mkEnableOption "telemetry of the board: exporter, Prometheus, Grafana";

    exporter = {
      package = lib.mkOption {
        type = lib.types.package;
        default = pkgs.tinygrad-orin;
        defaultText = lib.literalExpression "pkgs.tinygrad-orin";
        example = lib.literalExpression "pkgs.tinygrad-orin";
        description = "The package with `jetson-exporter`.";
      };

      listenAddress = listening.listenAddress "The exporter's address. Beyond the loopback its readings are open to all.";

      port = listening.port 9401 9500 "The exporter's port.";

      openFirewall = listening.openFirewall "the exporter's port";

      extraFlags = lib.mkOption {
        type = lib.types.listOf lib.types.str;
        default = [ ];
        example = [
          "--sample-rate"
          "20"
        ];
        description = "Further arguments of `jetson-exporter`; the one for debugfs does not get them.";
      };

      webConfigFile = lib.mkOption {
        type = lib.types.nullOr lib.types.str;
        default = null;
        example = "/var/lib/secrets/jetson-web.yml";
        description = ''
          A file on the board with TLS and passwords, in the format of Prometheus' exporter-toolkit.
          Root's alone will do; `systemctl reload jetson-exporter` reads it again. Set `scrape` to
          what this board's Prometheus needs then.
        '';
      };

      webFiles = lib.mkOption {
        type = lib.types.attrsOf lib.types.str;
        default = { };
        example = {
          "jetson.crt" = "/var/lib/secrets/jetson.crt";
          "jetson.key" = "/var/lib/secrets/jetson.key";
        };
        description = "The files that `webConfigFile` names, by the names that it has for them.";
      };

      scrape = lib.mkOption {
        type = lib.types.attrs;
        default = { };
        example = {
          scheme = "https";
          tls_config.ca_file = "/var/lib/prometheus-ca.crt";
          basic_auth = {
            username = "prometheus";
            password_file = "/var/lib/secrets/jetson-password";
          };
        };
        description = "What the scrape of the exporter needs besides its address.";
      };

      debugfs = {
        enable = lib.mkOption {
          type = lib.types.bool;
          default = false;
          example = true;
          description = ''
            Whether a second exporter reads the memory clock and the engines from debugfs. It has
            the capability to read every file (`CAP_DAC_READ_SEARCH`), because debugfs is root's.
          '';
        };

        port = listening.port 9402 9501 "The port of the second exporter, on the loopback.";
      };
    };

    nodeExporter = lib.mkOption {
      type = lib.types.bool;
      default = true;
      example = false;
      description = ''
        Whether node_exporter reports CPU, memory, disks and network. Its thermal_zone collector is
        off: on an Orin it waits for ever at the first zone that is powered down.
      '';
    };

    textfileDirectory = lib.mkOption {
      type = lib.types.path;
      default = "/var/lib/orin-textfile";
      example = "/var/lib/node-exporter/textfile";
      description = ''
        Where `orinbench llama-bench --textfile` leaves its figures for node_exporter. The group
        `video` may write there.
      '';
    };

    prometheus = {
      enable = lib.mkOption {
        type = lib.types.bool;
        default = true;
        example = false;
        description = "Whether Prometheus runs on this board, with our recording and alert rules.";
      };

      port = listening.port 9090 9091 "Prometheus' port, on the loopback.";

      retention = lib.mkOption {
        type = lib.types.str;
        default = "30d";
        example = "1y";
        description = "How long samples are kept, about 15 MB a day.";
      };

      scrapeInterval = lib.mkOption {
        type = lib.types.str;
        default = "5s";
        example = "15s";
        description = "Time between two scrapes. Energy is counted by the exporter in between.";
      };

      remoteWrite = lib.mkOption {
        inherit (options.services.prometheus.remoteWrite) type;
        default = [ ];
        example = lib.literalExpression ''
          [
            {
              url = "https://metrics.example.org/api/v1/write";
              basic_auth = {
                username = "orin";
                password_file = "/var/lib/secrets/remote-write";
              };
            }
          ]
        '';
        description = ''
          Where to send the samples too: one Prometheus, Mimir or VictoriaMetrics for several boards.
          Secrets by file; the user `prometheus` reads them.
        '';
      };

      extraScrapeConfigs = lib.mkOption {
        inherit (options.services.prometheus.scrapeConfigs) type;
        default = [ ];
        example = lib.literalExpression ''
          [
            {
              job_name = "orin-2";
              static_configs = [
                {
                  targets = [ "orin-2:9401" ];
                  labels.host = "orin-2";
                }
              ];
            }
          ]
        '';
        description = ''
          Further targets, such as the exporters of other boards. Give all targets of one machine
          the same label `host`: joules a token are counted by it.
        '';
      };
    };

    alertmanager = {
      enable = lib.mkOption {
        type = lib.types.bool;
        default = false;
        example = true;
        description = "Whether alerts go to an Alertmanager on this board.";
      };

      port = listening.port 9093 9094 "Alertmanager's port, on the loopback.";

      configuration = lib.mkOption {
        type = lib.types.attrs;
        default = {
          route.receiver = "none";
          receivers = [ { name = "none"; } ];
        };
        example = lib.literalExpression ''
          {
            route.receiver = "mail";
            receivers = [ { name = "mail"; email_configs = [ { to = "me@example.org"; } ]; } ];
          }
        '';
        description = "Alertmanager's own configuration.";
      };
    };
  };

  config = lib.mkIf cfg.enable (
    lib.mkMerge [
      {
        assertions = [
          (listening.reachable {
            inherit host;
            what = "the exporter";
            at = "orin.telemetry.exporter";
            cfg = cfg.exporter;
          })
        ]
        ++ secrets.assertions
        ++ [
          (check.rule "orin.telemetry.enable" true (pkgs ? tinygrad-orin)
            "this nixpkgs has no tinygrad-orin; import nixosModules.default, or add its overlay to nixpkgs.overlays"
          )
          (check.address "orin.telemetry.exporter.listenAddress" cfg.exporter.listenAddress)
          (check.unprivileged "orin.telemetry.exporter.port" cfg.exporter.port)
          (check.unprivileged "orin.telemetry.exporter.debugfs.port" cfg.exporter.debugfs.port)
          (check.unprivileged "orin.telemetry.prometheus.port" cfg.prometheus.port)
          (check.unprivileged "orin.telemetry.alertmanager.port" cfg.alertmanager.port)
          (check.rule "orin.telemetry.exporter.extraFlags" cfg.exporter.extraFlags
            (lib.all (flag: !check.matches "--(listen|web-config)(=.*)?" flag) cfg.exporter.extraFlags)
            "an option sets one of these flags; leave it out and set `listenAddress`, `port` or `webConfigFile`"
          )
          (check.flags "orin.telemetry.exporter.extraFlags" cfg.exporter.extraFlags)
          (check.rule "orin.telemetry.textfileDirectory" (toString cfg.textfileDirectory)
            (paths.ownable cfg.textfileDirectory)
            ''the folder is given to the group video; write one of its own and no system's, as in "/var/lib/orin-textfile"''
          )
          (check.noSecrets "orin.telemetry.alertmanager.configuration" cfg.alertmanager.configuration
            "use the setting's twin with _file at its end, as in `smtp_auth_password_file`"
          )
          (check.rule "orin.telemetry.exporter.webFiles" (lib.attrNames cfg.exporter.webFiles) (
            cfg.exporter.webFiles == { } || cfg.exporter.webConfigFile != null
          ) "nothing names these files; set `orin.telemetry.exporter.webConfigFile` too")
          (check.rule "orin.telemetry.alertmanager.enable" cfg.alertmanager.enable (
            cfg.alertmanager.enable -> cfg.prometheus.enable
          ) "no Prometheus of this host sends it alerts; set `orin.telemetry.prometheus.enable = true`")
        ]
        ++ lib.concatLists (
          lib.mapAttrsToList (name: file: [
            (check.rule "orin.telemetry.exporter.webFiles" name (check.matches "[A-Za-z0-9_.-]+" name)
              ''write the file's name alone, as the web configuration has it, as in "jetson.key"''
            )
            (paths.file {
              inherit host;
              option = "orin.telemetry.exporter.webFiles.${check.show name}";
              path = file;
              why = "which everyone can read";
              example = "/var/lib/secrets/${name}";
            })
          ]) cfg.exporter.webFiles
        )
        ++ check.absoluteFiles "orin.telemetry.alertmanager.configuration" cfg.alertmanager.configuration;

        orin.ports = {
          "orin.telemetry.exporter.port" = cfg.exporter.port;
        }
        // lib.optionalAttrs cfg.exporter.debugfs.enable {
          "orin.telemetry.exporter.debugfs.port" = cfg.exporter.debugfs.port;
        }
        // lib.optionalAttrs cfg.prometheus.enable {
          "orin.telemetry.prometheus.port" = config.services.prometheus.port;
        }
        // lib.optionalAttrs cfg.alertmanager.enable {
          "orin.telemetry.alertmanager.port" = cfg.alertmanager.port;
        }
        // lib.optionalAttrs cfg.nodeExporter {
          "services.prometheus.exporters.node.port" = config.services.prometheus.exporters.node.port;
        };

        systemd.services.jetson-exporter = exporterUnit "Jetson sensors for Prometheus" (
          [
            "--listen"
            (listening.socket cfg.exporter.listenAddress cfg.exporter.port)
          ]
          ++ lib.optionals (cfg.exporter.webConfigFile != null) [
            "--web-config"
            "%d/web.yml"
          ]
          ++ cfg.exporter.extraFlags
        ) webSettings;
        systemd.services.jetson-exporter-debugfs = lib.mkIf cfg.exporter.debugfs.enable (
          exporterUnit "Jetson sensors that only root may read"
            [
              "--listen"
              (address cfg.exporter.debugfs.port)
              "--collectors"
              "debugfs"
              "--sample-rate"
              "0"
            ]
            {
              AmbientCapabilities = "CAP_DAC_READ_SEARCH";
              CapabilityBoundingSet = "CAP_DAC_READ_SEARCH";
              # In a user namespace the capability would not count for debugfs.
              PrivateUsers = false;
            }
        );
        networking.firewall.allowedTCPPorts = lib.optional cfg.exporter.openFirewall cfg.exporter.port;

        systemd.tmpfiles.rules = [ "d ${toString cfg.textfileDirectory} 0775 root video -" ];
        services.prometheus.exporters.node = lib.mkIf cfg.nodeExporter {
          enable = true;
          listenAddress = lib.mkDefault loopback;
          # Which units failed: the alert OrinUnitFailed asks for it.
          enabledCollectors = [ "systemd" ];
          disabledCollectors = [ "thermal_zone" ];
          extraFlags = [ "--collector.textfile.directory=${toString cfg.textfileDirectory}" ];
        };

        system.preSwitchChecks = secrets.checks "orinSecrets";
      }

      (lib.mkIf cfg.prometheus.enable {
        assertions = [
          {
            assertion = lib.all (
              target:
              lib.all (secret: secret == null) [
                (target.basic_auth.password or null)
                (target.bearer_token or null)
                (target.sigv4.secret_key or null)
                (target.authorization.credentials or null)
                (target.oauth2.client_secret or null)
                (target.headers.Authorization or null)
              ]
            ) cfg.prometheus.remoteWrite;
            message = line ''
              host ${host}: orin.telemetry.prometheus.remoteWrite holds a password, which would lie in the
              Nix store for everyone to read. Use `basic_auth.password_file`, `bearer_token_file`, or
              sigv4's `profile`.'';
          }
          (check.duration "orin.telemetry.prometheus.retention" cfg.prometheus.retention)
          (check.duration "orin.telemetry.prometheus.scrapeInterval" cfg.prometheus.scrapeInterval)
          # A sample older than five minutes is none to Prometheus, and the alerts look at shorter times.
          (check.rule "orin.telemetry.prometheus.scrapeInterval" cfg.prometheus.scrapeInterval (
            check.milliseconds cfg.prometheus.scrapeInterval <= 120000
          ) ''the alerts need a sample every two minutes at least; write "2m" or less, as in "5s"'')
        ]
        ++ lib.concatMap (target: [
          (check.url "orin.telemetry.prometheus.remoteWrite" target.url)
          (check.noPassword "orin.telemetry.prometheus.remoteWrite" target.url
            "use `basic_auth.username` and `basic_auth.password_file`"
          )
        ]) cfg.prometheus.remoteWrite
        # Else promtool says so, at the end of the build. Those of our option have the rule below.
        ++ map (
          name:
          check.rule "services.prometheus.scrapeConfigs" name (
            lib.count (job: job.job_name == name) config.services.prometheus.scrapeConfigs
            <= 1 + lib.count (job: job.job_name == name) cfg.prometheus.extraScrapeConfigs
          ) "orin.telemetry has a job of that name; give yours another, or leave it out"
        ) taken
        ++ map (
          job:
          check.rule "orin.telemetry.prometheus.extraScrapeConfigs" job.job_name (
            !lib.elem job.job_name taken
            && !lib.hasPrefix "llm-" job.job_name
            && lib.count (other: other.job_name == job.job_name) cfg.prometheus.extraScrapeConfigs == 1
          ) ''this host has a job of that name; give yours another, as in "orin-2"''
        ) cfg.prometheus.extraScrapeConfigs
        ++ map (
          job:
          check.noSecrets "orin.telemetry.prometheus.extraScrapeConfigs" job
            "use the setting's twin with _file at its end, as in `password_file`"
        ) cfg.prometheus.extraScrapeConfigs
        ++ check.absoluteFiles "orin.telemetry.prometheus.extraScrapeConfigs" cfg.prometheus.extraScrapeConfigs
        ++ check.absoluteFiles "orin.telemetry.prometheus.remoteWrite" cfg.prometheus.remoteWrite;
        systemd.services.prometheus.serviceConfig = lib.mkIf (llmKey != null) {
          LoadCredential = "llm-metrics:${llmKey}";
        };
        services.prometheus = {
          enable = true;
          listenAddress = lib.mkDefault loopback;
          port = lib.mkDefault cfg.prometheus.port;
          inherit (cfg.prometheus) remoteWrite;
          retentionTime = lib.mkDefault cfg.prometheus.retention;
          # The files that it names are not there while the system is built.
          checkConfig = lib.mkDefault (
            if cfg.prometheus.remoteWrite == [ ] && llmKey == null then true else "syntax-only"
          );
          globalConfig = {
            scrape_interval = lib.mkDefault cfg.prometheus.scrapeInterval;
            evaluation_interval = lib.mkDefault cfg.prometheus.scrapeInterval;
            external_labels.host = lib.mkDefault host;
          };
          ruleFiles = map (name: ../../telemetry/rules + "/${name}") (
            lib.filter (lib.hasSuffix ".yml") (lib.attrNames (builtins.readDir ../../telemetry/rules))
          );
          scrapeConfigs =
            let
              inherit (config.services.prometheus.exporters) node;
              # One target each: two with the same job and instance would share one `up`.
              job = jobAt loopback;
              jobAt = listens: job_name: port: {
                inherit job_name;
                static_configs = [
                  {
                    targets = [ (listening.reach listens port) ];
                    labels = {
                      inherit host;
                      instance = host;
                    };
                  }
                ];
              };
            in
            [
              (jobAt cfg.exporter.listenAddress "jetson" cfg.exporter.port // cfg.exporter.scrape)
              (jobAt config.services.prometheus.listenAddress "prometheus" config.services.prometheus.port)
            ]
            ++ lib.optional cfg.exporter.debugfs.enable (job "jetson-debugfs" cfg.exporter.debugfs.port)
            ++ lib.optional cfg.nodeExporter (jobAt node.listenAddress "node" node.port)
            ++ lib.optionals (llm.enable && llm.metrics) (
              lib.mapAttrsToList (
                name: model:
                jobAt llm.host "llm-${name}" model.port
                // lib.optionalAttrs (llmKey != null) {
                  authorization.credentials_file = "/run/credentials/prometheus.service/llm-metrics";
                }
              ) llm.models
            )
            ++ cfg.prometheus.extraScrapeConfigs;
          alertmanagers = lib.optional cfg.alertmanager.enable {
            static_configs = [ { targets = [ (address cfg.alertmanager.port) ]; } ];
          };
          alertmanager = lib.mkIf cfg.alertmanager.enable {
            enable = true;
            listenAddress = loopback;
            inherit (cfg.alertmanager) port configuration;
          };
        };
      })
    ]
  );
}
