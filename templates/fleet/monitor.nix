# Prometheus that takes the boards' samples, and Grafana with our dashboards. No Orin: any NixOS machine.
# Grafana is on its loopback, with a password of its own, made at its first start:
#   ssh -L 3000:localhost:3000 root@monitor.local cat /var/lib/orin-grafana/grafana-admin-password
{ config, lib, ... }:
{
  imports = [ ./hardware.nix ];

  orin = {
    board.check = false;
    telemetry = {
      enable = true;
      # It has no sensors of a Jetson.
      exporter.enable = false;
      prometheus.retention = "1y";
    };
  };
  services = {
    prometheus.extraFlags = [ "--web.enable-remote-write-receiver" ];
    # The boards write over TLS, with a password; nothing else passes. On the monitor, after the first switch:
    #   openssl req -x509 -newkey ed25519 -nodes -days 3650 -subj /CN=monitor.local \
    #     -addext subjectAltName=DNS:monitor.local -keyout monitor.key -out monitor.crt
    #   htpasswd -cB boards.htpasswd orin
    #   install -D -o nginx -m 0400 -t /var/lib/secrets monitor.crt monitor.key boards.htpasswd
    #   systemctl restart nginx
    # The boards have monitor.crt as /var/lib/secrets/monitor-ca.crt, and that password in monitor-password; both are
    # prometheus' to read.
    nginx = {
      enable = true;
      virtualHosts."monitor.local" = {
        onlySSL = true;
        listen = [
          {
            addr = "0.0.0.0";
            port = 9443;
            ssl = true;
          }
        ];
        sslCertificate = "/var/lib/secrets/monitor.crt";
        sslCertificateKey = "/var/lib/secrets/monitor.key";
        basicAuthFile = "/var/lib/secrets/boards.htpasswd";
        locations = {
          "= /api/v1/write".proxyPass = "http://127.0.0.1:9090";
          "/".return = "404";
        };
      };
    };
    avahi = {
      enable = true;
      nssmdns4 = true;
      publish.enable = true;
      publish.addresses = true;
    };
    openssh = {
      enable = true;
      settings.PasswordAuthentication = false;
      settings.KbdInteractiveAuthentication = false;
    };
  };
  networking.firewall.allowedTCPPorts = [ 9443 ];
  users.users.root.openssh.authorizedKeys.keys = [ "ssh-ed25519 replace-me" ];
  system.preSwitchChecks.sshKeys = lib.mkIf (lib.any (lib.hasInfix "replace-me") config.users.users.root.openssh.authorizedKeys.keys) ''
    echo "monitor.nix: users.users.root.openssh.authorizedKeys.keys still holds replace-me: nobody could log in."
    exit 1
  '';
  system.stateVersion = "26.05";
}
