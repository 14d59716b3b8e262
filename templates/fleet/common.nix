# What every board has.
{
  orin = {
    host = {
      enable = true;
      sshKeys = [ "ssh-ed25519 replace-me" ];
      disk.root = "nixos";
      disk.boot = "ESP";
      # A cache of one's own: the first board builds, the others fetch.
      caches."https://cache.example.org" =
        "cache.example.org-1:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=";
    };
    tinygrad.enable = true;
    performance.enable = true;

    # Each board keeps a day; one Prometheus elsewhere keeps them all, and has the dashboards.
    telemetry = {
      enable = true;
      grafana.enable = false;
      prometheus = {
        retention = "1d";
        remoteWrite = [
          {
            url = "https://metrics.example.org/api/v1/write";
            basic_auth = {
              username = "orin";
              password_file = "/var/lib/secrets/remote-write";
            };
          }
        ];
      };
    };
  };
}
