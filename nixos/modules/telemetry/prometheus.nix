# Prometheus and Alertmanager with our rules, on the loopback.
{
  config,
  lib,
  options,
  ...
}:
let
  inherit (config.orin) telemetry;
  cfg = telemetry.prometheus;
  host = config.networking.hostName;
  llm = config.orin.llm-server or { enable = false; };
  llmKey = if llm.enable && llm.metrics then llm.metricsKeyFile else null;

  common = import ../common { inherit lib config; };
  inherit (common) check listening;
  inherit (common) option switch;
  inherit (listening) loopback;
  # Names of jobs that are ours.
  taken = common.words "jetson jetson-debugfs node prometheus";
in
{
  imports = [ ../common/ports.nix ];

  options.orin.telemetry = {
    prometheus = {
      enable = switch true "Whether Prometheus runs on this board, with our recording and alert rules.";

      port = listening.port 9090 9091 "Prometheus' port, on the loopback.";

      retention = option lib.types.str "30d" "1y" "How long samples are kept, about 15 MB a day.";

      scrapeInterval =
        option lib.types.str "5s" "15s"
          "Time between two scrapes. Energy is counted by the exporter in between.";

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
      enable = switch false "Whether alerts go to an Alertmanager on this board.";

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

  config = lib.mkIf telemetry.enable (
    lib.mkMerge [
      {
        assertions = [
          (check.unprivileged "orin.telemetry.prometheus.port" cfg.port)
          (check.unprivileged "orin.telemetry.alertmanager.port" telemetry.alertmanager.port)
          (check.noSecrets "orin.telemetry.alertmanager.configuration" telemetry.alertmanager.configuration
            "use the setting's twin with _file at its end, as in `smtp_auth_password_file`"
          )
          (check.rule "orin.telemetry.alertmanager.enable" telemetry.alertmanager.enable (
            telemetry.alertmanager.enable -> cfg.enable
          ) "no Prometheus of this host sends it alerts; set `orin.telemetry.prometheus.enable = true`")
        ]
        ++ check.absoluteFiles "orin.telemetry.alertmanager.configuration" telemetry.alertmanager.configuration;

        orin.ports =
          lib.optionalAttrs cfg.enable {
            "orin.telemetry.prometheus.port" = config.services.prometheus.port;
          }
          // lib.optionalAttrs telemetry.alertmanager.enable {
            "orin.telemetry.alertmanager.port" = telemetry.alertmanager.port;
          };
      }

      (lib.mkIf cfg.enable {
        assertions = [
          (check.demand
            (lib.all (
              target:
              lib.all (secret: secret == null) [
                (target.basic_auth.password or null)
                (target.bearer_token or null)
                (target.sigv4.secret_key or null)
                (target.authorization.credentials or null)
                (target.oauth2.client_secret or null)
                (target.headers.Authorization or null)
              ]
            ) cfg.remoteWrite)
            ''
              orin.telemetry.prometheus.remoteWrite holds a password, which would lie in the
              Nix store for everyone to read. Use `basic_auth.password_file`, `bearer_token_file`, or
              sigv4's `profile`.''
          )
          (check.duration "orin.telemetry.prometheus.retention" cfg.retention)
          (check.duration "orin.telemetry.prometheus.scrapeInterval" cfg.scrapeInterval)
          # A sample older than five minutes is none to Prometheus, and the alerts look at shorter times.
          (check.rule "orin.telemetry.prometheus.scrapeInterval" cfg.scrapeInterval (
            check.milliseconds cfg.scrapeInterval <= 120000
          ) ''the alerts need a sample every two minutes at least; write "2m" or less, as in "5s"'')
        ]
        ++ lib.concatMap (target: [
          (check.url "orin.telemetry.prometheus.remoteWrite" target.url)
          (check.noPassword "orin.telemetry.prometheus.remoteWrite" target.url
            "use `basic_auth.username` and `basic_auth.password_file`"
          )
        ]) cfg.remoteWrite
        # Else promtool says so, at the end of the build. Those of our option have the rule below.
        ++ map (
          name:
          check.rule "services.prometheus.scrapeConfigs" name (
            lib.count (job: job.job_name == name) config.services.prometheus.scrapeConfigs
            <= 1 + lib.count (job: job.job_name == name) cfg.extraScrapeConfigs
          ) "orin.telemetry has a job of that name; give yours another, or leave it out"
        ) taken
        ++ map (
          job:
          check.rule "orin.telemetry.prometheus.extraScrapeConfigs" job.job_name (
            !lib.elem job.job_name taken
            && !lib.hasPrefix "llm-" job.job_name
            && lib.count (other: other.job_name == job.job_name) cfg.extraScrapeConfigs == 1
          ) ''this host has a job of that name; give yours another, as in "orin-2"''
        ) cfg.extraScrapeConfigs
        ++ map (
          job:
          check.noSecrets "orin.telemetry.prometheus.extraScrapeConfigs" job
            "use the setting's twin with _file at its end, as in `password_file`"
        ) cfg.extraScrapeConfigs
        ++ check.absoluteFiles "orin.telemetry.prometheus.extraScrapeConfigs" cfg.extraScrapeConfigs
        ++ check.absoluteFiles "orin.telemetry.prometheus.remoteWrite" cfg.remoteWrite;
        systemd.services.prometheus.serviceConfig = lib.mkIf (llmKey != null) {
          LoadCredential = "llm-metrics:${llmKey}";
        };
        services.prometheus = {
          enable = true;
          listenAddress = lib.mkDefault loopback;
          port = lib.mkDefault cfg.port;
          inherit (cfg) remoteWrite;
          retentionTime = lib.mkDefault cfg.retention;
          # The files that it names are not there while the system is built.
          checkConfig = lib.mkDefault (
            if cfg.remoteWrite == [ ] && llmKey == null then true else "syntax-only"
          );
          globalConfig = {
            scrape_interval = lib.mkDefault cfg.scrapeInterval;
            evaluation_interval = lib.mkDefault cfg.scrapeInterval;
            external_labels.host = lib.mkDefault host;
          };
          ruleFiles = map (name: ../../../telemetry/rules + "/${name}") (
            lib.filter (lib.hasSuffix ".yml") (lib.attrNames (builtins.readDir ../../../telemetry/rules))
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
            lib.optional telemetry.exporter.enable (
              jobAt telemetry.exporter.listenAddress "jetson" telemetry.exporter.port // telemetry.exporter.scrape
            )
            ++ [
              (jobAt config.services.prometheus.listenAddress "prometheus" config.services.prometheus.port)
            ]
            ++ lib.optional (telemetry.exporter.enable && telemetry.exporter.debugfs.enable) (
              job "jetson-debugfs" telemetry.exporter.debugfs.port
            )
            ++ lib.optional telemetry.nodeExporter (jobAt node.listenAddress "node" node.port)
            ++ lib.optionals (llm.enable && llm.metrics) (
              lib.mapAttrsToList (
                name: model:
                jobAt llm.host "llm-${name}" model.port
                // lib.optionalAttrs (llmKey != null) {
                  authorization.credentials_file = "/run/credentials/prometheus.service/llm-metrics";
                }
              ) llm.models
            )
            ++ cfg.extraScrapeConfigs;
          alertmanagers = lib.optional telemetry.alertmanager.enable {
            static_configs = [ { targets = [ (listening.socket loopback telemetry.alertmanager.port) ]; } ];
          };
          alertmanager = lib.mkIf telemetry.alertmanager.enable {
            enable = true;
            listenAddress = loopback;
            inherit (telemetry.alertmanager) port configuration;
            # Else it listens on every address for others of its kind.
            extraFlags = lib.mkIf (config.services.prometheus.alertmanager.clusterPeers == [ ]) [
              "--cluster.listen-address="
            ];
          };
        };
      })
    ]
  );
}
