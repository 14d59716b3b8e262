# Grafana with our dashboards, on the loopback. Its key and its password are of this board alone: made at
# the first boot where no option names a file.
{
  config,
  lib,
  options,
  ...
}:
let
  inherit (config.orin) telemetry;
  cfg = telemetry.grafana;
  common = import ../common { inherit lib config; };
  inherit (common) check listening;
  inherit (common) option switch;
  secrets = common.secrets {
    files."orin.telemetry.grafana.secretKeyFile" = cfg.secretKeyFile;
    files."orin.telemetry.grafana.adminPasswordFile" = cfg.adminPasswordFile;
  };
  # Secret by name: where it is, and whether this board makes it.
  folder = "/var/lib/orin-grafana";
  files = {
    grafana-secret-key = cfg.secretKeyFile;
    grafana-admin-password = cfg.adminPasswordFile;
  };
  made = lib.attrNames (lib.filterAttrs (_: file: file == null) files);
  # systemd hands them over: the files themselves stay root's.
  credential = name: "$__file{/run/credentials/grafana.service/${name}}";
  # Of somebody else's data source; `lib.mkForce true` is a set with the value in it.
  isDefault =
    source:
    source.uid or null != "prometheus" && source.isDefault.content or (source.isDefault or false);
  file = lib.types.nullOr (lib.types.either lib.types.str lib.types.path);
in
{
  imports = [ ../common/ports.nix ];

  options.orin.telemetry.grafana = {
    enable = switch true "Whether Grafana shows our dashboards.";

    listenAddress = listening.listenAddress "Grafana's address.";

    port = listening.port 3000 3001 "Grafana's port.";

    openFirewall = listening.openFirewall "Grafana's port";

    secretKeyFile = option file null "/run/agenix/grafana-secret-key" ''
      A file on the board with the key that Grafana encrypts its database's secrets with. Root's
      alone will do. null: one is made at the first boot, `${folder}/grafana-secret-key`.
    '';

    adminPasswordFile = option file null "/run/secrets/grafana-admin" ''
      A file on the board with the first password of Grafana's user `admin`. null: one is made at the
      first boot, `${folder}/grafana-admin-password`, and said once on the console.
    '';
  };

  config = lib.mkIf (telemetry.enable && cfg.enable) {
    assertions =
      secrets.assertions
      ++ listening.rules "Grafana" "orin.telemetry.grafana" "listenAddress" cfg
      ++ [
        (check.rule "orin.telemetry.grafana.adminPasswordFile" cfg.adminPasswordFile (
          cfg.adminPasswordFile == null || toString cfg.adminPasswordFile != toString cfg.secretKeyFile
        ) "this is `secretKeyFile` too; the password is typed by people, the key is not: give each a file")
      ];
    system.preSwitchChecks = secrets.checks "orinGrafana";
    networking.firewall.allowedTCPPorts = lib.optional cfg.openFirewall cfg.port;
    orin.ports."orin.telemetry.grafana.port" = cfg.port;

    systemd.services.orin-grafana-secrets = lib.mkIf (made != [ ]) {
      description = "Grafana's key and password, where nobody has set them";
      requiredBy = [ "grafana.service" ];
      before = [ "grafana.service" ];
      serviceConfig = {
        Type = "oneshot";
        RemainAfterExit = true;
        StateDirectory = baseNameOf folder;
        StateDirectoryMode = "0700";
        PrivateNetwork = true;
        PrivateTmp = true;
        ProtectHome = true;
        ProtectSystem = "strict";
        NoNewPrivileges = true;
        UMask = "0277";
      };
      # The log has where each is, the console alone what: there is its owner.
      script = ''
        for secret in ${toString (map (name: "${folder}/${name}") made)}; do
          test ! -s $secret || continue
          rm -f $secret.new
          head -c 32 /dev/urandom | base64 | tr +/ -_ | tr -d '=\n' >$secret.new
          sync $secret.new
          mv $secret.new $secret
          echo "wrote $secret"
          case $secret in
          *-password) echo "$secret: $(cat $secret) (said this once)" >/dev/console ;;
          esac
        done
      '';
    };

    systemd.services.grafana.serviceConfig.LoadCredential = lib.mapAttrsToList (
      name: given: "${name}:${if given == null then "${folder}/${name}" else toString given}"
    ) files;

    services.grafana = {
      enable = true;
      settings = {
        server = {
          http_addr = lib.mkDefault cfg.listenAddress;
          http_port = lib.mkDefault cfg.port;
        };
        security = {
          secret_key = lib.mkDefault (credential "grafana-secret-key");
          admin_password = lib.mkDefault (credential "grafana-admin-password");
        };
        analytics = {
          reporting_enabled = lib.mkDefault false;
          check_for_updates = lib.mkDefault false;
          check_for_plugin_updates = lib.mkDefault false;
        };
        "auth.anonymous".enabled = lib.mkDefault false;
        users.allow_sign_up = lib.mkDefault false;
      };
      provision = {
        enable = true;
        datasources.settings.datasources = lib.optional telemetry.prometheus.enable {
          name = "Prometheus";
          uid = "prometheus";
          type = "prometheus";
          url = "http://${listening.reach config.services.prometheus.listenAddress config.services.prometheus.port}";
          # Grafana does not start with two. Of the definitions as written: what they become asks for this.
          isDefault = lib.mkDefault (
            !lib.any isDefault (
              lib.concatMap (
                given: if lib.isList given.settings.datasources or null then given.settings.datasources else [ ]
              ) (options.services.grafana.provision.datasources.definitions or [ ])
            )
          );
          jsonData.timeInterval = telemetry.prometheus.scrapeInterval;
        };
        dashboards.settings.providers = [
          {
            name = "tinygrad-orin";
            options.path = lib.fileset.toSource {
              root = ../../../telemetry/dashboards;
              fileset = lib.fileset.fileFilter (each: each.hasExt "json") ../../../telemetry/dashboards;
            };
          }
        ];
      };
    };
  };
}
