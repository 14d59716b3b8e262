# What every board has.
{
  orin = {
    host = {
      enable = true;
      sshKeys = [ "ssh-ed25519 replace-me" ];
      disk.root = "nixos";
      disk.boot = "ESP";
      # A cache of one's own: the first board builds, the others fetch. orin-1 says its key at its first
      # start: journalctl -u orin-cache-key
      caches."http://orin-1.local:5000" = "orin-1-1:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=";
    };
    tinygrad.enable = true;
    performance.enable = true;

    # Each board keeps a day; the monitor keeps them all, and has the dashboards.
    telemetry = {
      enable = true;
      grafana.enable = false;
      prometheus = {
        retention = "1d";
        remoteWrite = [
          {
            url = "https://monitor.local:9443/api/v1/write";
            tls_config.ca_file = "/var/lib/secrets/monitor-ca.crt";
            basic_auth = {
              username = "orin";
              password_file = "/var/lib/secrets/monitor-password";
            };
          }
        ];
      };
    };

    # Every Sunday what the flake says then, and back again where a board does not come up with it.
    upgrade = {
      enable = true;
      flake = "github:replace-me/my-orins";
      dates = "Sun 03:00";
      reboot = true;
    };
  };
}
