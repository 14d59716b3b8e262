# Prometheus that takes the boards' samples, and Grafana with our dashboards. No Orin: any NixOS machine.
{
  config,
  lib,
  tinygrad-orin,
  ...
}:
{
  imports = [ ./hardware.nix ];

  services = {
    prometheus = {
      enable = true;
      retentionTime = "1y";
      extraFlags = [ "--web.enable-remote-write-receiver" ];
      ruleFiles = map (name: "${tinygrad-orin}/telemetry/rules/${name}") (
        lib.filter (lib.hasSuffix ".yml") (
          lib.attrNames (builtins.readDir "${tinygrad-orin}/telemetry/rules")
        )
      );
    };
    grafana = {
      enable = true;
      settings = {
        server.http_addr = "0.0.0.0";
        # Made on the machine: head -c 32 /dev/urandom | base64 > /var/lib/secrets/grafana-key
        security.secret_key = "$__file{/var/lib/secrets/grafana-key}";
      };
      provision = {
        enable = true;
        datasources.settings.datasources = [
          {
            name = "Prometheus";
            uid = "prometheus";
            type = "prometheus";
            url = "http://127.0.0.1:9090";
          }
        ];
        dashboards.settings.providers = [
          {
            name = "tinygrad-orin";
            options.path = "${tinygrad-orin}/telemetry/dashboards";
          }
        ];
      };
    };
    avahi = {
      enable = true;
      nssmdns4 = true;
      publish.enable = true;
      publish.addresses = true;
    };
    openssh.enable = true;
  };
  # Open to the boards' network: put it behind a VPN or a proxy with passwords elsewhere.
  networking.firewall.allowedTCPPorts = [
    3000
    9090
  ];
  users.users.root.openssh.authorizedKeys.keys = [ "ssh-ed25519 replace-me" ];
  system.preSwitchChecks.sshKeys = lib.mkIf (lib.any (lib.hasInfix "replace-me") config.users.users.root.openssh.authorizedKeys.keys) ''
    echo "monitor.nix: users.users.root.openssh.authorizedKeys.keys still holds replace-me: nobody could log in."
    exit 1
  '';
  system.stateVersion = "26.05";
}
