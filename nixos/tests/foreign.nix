# Our modules in a configuration that is older than they are: alone, in any order, and around a host that
# has values of its own. What is wrong, one string each: nothing is built.
{ self }:
let
  inherit (self.inputs.nixpkgs) lib;
  modules = removeAttrs self.nixosModules [ "default" ];

  evaluated =
    modules:
    (lib.nixosSystem {
      modules = [ { nixpkgs.pkgs = self.legacyPackages.x86_64-linux; } ] ++ modules;
    }).config;
  broken = config: map (rule: rule.message) (lib.filter (rule: !rule.assertion) config.assertions);

  # All of ours on, the last first.
  switchedOn = {
    orin = {
      board.check = false;
      host = {
        enable = true;
        user = "ada";
        sshKeys = [
          "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIG9uZSBvZiBub2JvZHksIGZvciB0aGUgZXhhbXBsZXMh ada@attic"
        ];
        rescueLogin = true;
      };
      tinygrad.enable = true;
      performance.enable = true;
      telemetry.enable = true;
      telemetry.alertmanager.enable = true;
      telemetry.exporter.listenAddress = "fd00::5";
      llm-server = {
        enable = true;
        models.main.file = "/srv/model.gguf";
      };
      upgrade.enable = true;
      cache.enable = true;
      cache.listenAddress = "::";
      backup = {
        enable = true;
        repository = "/mnt/usb/attic";
        passwordFile = "/var/lib/secrets/backup";
      };
    };
  };
  attic = evaluated (
    lib.reverseList (lib.attrValues modules)
    ++ [
      switchedOn
      ./stranger.nix
    ]
  );

  rescue =
    config:
    lib.hasInfix "--autologin root" (
      toString config.systemd.services."serial-getty@ttyTCU0".serviceConfig.ExecStart or ""
    );
  said = words: toString (lib.sort lib.lessThan words);
  # What the stranger wrote, and what it became.
  kept = {
    "networking.firewall.enable" = !attic.networking.firewall.enable;
    "boot.loader.systemd-boot.enable" = !attic.boot.loader.systemd-boot.enable;
    "fileSystems./.device" = attic.fileSystems."/".device == "tank/root";
    "fileSystems./boot.options" = attic.fileSystems."/boot".options == [ "nofail" ];
    # Ada has a password, and is asked for it.
    "security.sudo" =
      attic.security.sudo.wheelNeedsPassword
      && !lib.any (rule: lib.elem "ada" rule.users) attic.security.sudo.extraRules
      && attic.nix.settings.trusted-users == [ "root" ];
    "services.openssh.settings.PermitRootLogin" =
      attic.services.openssh.settings.PermitRootLogin == "no";
    "services.timesyncd.enable" = !attic.services.timesyncd.enable;
    "services.avahi.enable" = !attic.services.avahi.enable;
    "services.prometheus.port" = attic.services.prometheus.port == 9999;
    "services.prometheus.retentionTime" = attic.services.prometheus.retentionTime == "2y";
    "services.prometheus.globalConfig.external_labels" =
      attic.services.prometheus.globalConfig.external_labels.host == "attic-rack-2";
    "services.prometheus.scrapeConfigs" =
      said (map (job: job.job_name) attic.services.prometheus.scrapeConfigs)
      == "jetson llm-main node prometheus router";
    "services.prometheus.exporters.node.enabledCollectors" =
      said attic.services.prometheus.exporters.node.enabledCollectors == "processes systemd";
    # On the loopback alone, with no port for others of its kind.
    "services.prometheus.alertmanager" =
      let
        flags = lib.splitString " " attic.systemd.services.alertmanager.serviceConfig.ExecStart;
      in
      lib.elem "--web.listen-address" flags && lib.elem "--cluster.listen-address=" flags;
    "services.grafana.settings.server.http_port" =
      attic.services.grafana.settings.server.http_port == 8080;
    "services.grafana.settings.security.secret_key" =
      attic.services.grafana.settings.security.secret_key == "$__file{/var/lib/attic/key}";
    "powerManagement.cpuFreqGovernor" = attic.powerManagement.cpuFreqGovernor == "schedutil";
    "nix.gc.automatic" = !attic.nix.gc.automatic;
    # Root's without a password on the serial console, where that is asked for, and nowhere else.
    "orin.host.rescueLogin" = rescue attic && !alone.host.orin.host.rescueLogin;
    "orin.upgrade.units" =
      said attic.orin.upgrade.units
      == "grafana.service jetson-exporter.service orin-gpu.service orin-llm-server-main.service "
      + "orin-performance-readback.service prometheus.service sshd.service";
    "services.restic.backups.orin" =
      lib.hasInfix "/home/ada/.local/state/tinygrad-orin/history.db" attic.services.restic.backups.orin.backupPrepareCommand;
    "systemd.sockets.harmonia" =
      attic.systemd.sockets.harmonia.socketConfig.ListenStream == "10.0.0.5:5050";
    "systemd.services.harmonia" =
      attic.systemd.services.orin-cache-key.requiredBy == [ "harmonia.service" ]
      && lib.hasInfix "/var/lib/orin-cache/secret-key" (
        toString attic.systemd.services.harmonia.serviceConfig.LoadCredential
      );
    # Ours follow: Grafana asks the stranger's Prometheus.
    "services.grafana.provision" =
      said (
        map (
          source: "${source.url} ${lib.boolToString source.isDefault}"
        ) attic.services.grafana.provision.datasources.settings.datasources
      ) == "http://10.0.0.5:9999 false http://loki:3100 true";
    # And Prometheus finds what listens where the stranger, or our option, says.
    "services.prometheus.scrapeConfigs.*.targets" =
      said (
        lib.concatMap (
          job: lib.concatMap (target: target.targets) job.static_configs
        ) attic.services.prometheus.scrapeConfigs
      ) == "10.0.0.5:9999 127.0.0.1:8000 127.0.0.1:9111 [fd00::5]:9401 router:9100";
  };

  # A module that nobody has switched on says nothing, and needs no other module of ours and no overlay.
  # NixOS' own modules have no say in it; of theirs, telemetry asks for a type.
  alone = lib.mapAttrs (
    _: module:
    (lib.evalModules {
      modules = [
        module
        {
          options = {
            assertions = lib.mkOption { default = [ ]; };
            services.prometheus = lib.genAttrs [ "remoteWrite" "scrapeConfigs" ] (
              _: lib.mkOption { type = lib.types.raw; }
            );
            services.openssh.enable = lib.mkOption { default = false; };
            hardware.graphics.enable = lib.mkOption { default = false; };
          };
          config = {
            _module.args.pkgs = self.inputs.nixpkgs.legacyPackages.x86_64-linux;
            _module.freeformType = lib.types.lazyAttrsOf lib.types.anything;
            networking.hostName = "board";
          };
        }
      ];
    }).config
  ) modules;
in
broken attic
++ map (name: "${name} is not what the host says") (
  lib.attrNames (lib.filterAttrs (_: ok: !ok) kept)
)
++ lib.concatLists (
  lib.mapAttrsToList (
    name: config:
    map (message: "${name} alone: ${message}") (lib.filter (lib.hasInfix "orin.") (broken config))
  ) alone
)
