# A host file of somebody's own, older than our modules: it has its Prometheus, Grafana, node exporter, users,
# firewall, disks, loader and governor, with plain values and one `mkForce`. Our modules must let each of them stand.
{ lib, ... }:
{
  networking = {
    hostName = "attic";
    nftables.enable = true;
    firewall.enable = false;
  };
  time.timeZone = "Europe/Athens";
  system.stateVersion = "24.11";

  boot.loader = {
    grub = {
      enable = true;
      device = "nodev";
      efiSupport = true;
    };
    systemd-boot.enable = false;
    efi.canTouchEfiVariables = false;
  };
  fileSystems = {
    "/" = {
      device = "tank/root";
      fsType = "zfs";
      options = [ "zfsutil" ];
    };
    "/boot" = {
      device = "/dev/disk/by-uuid/1234-ABCD";
      fsType = "vfat";
      options = [ "nofail" ];
    };
  };
  fileSystems."/mnt/usb" = {
    device = "/dev/disk/by-label/attic-backup";
    fsType = "ext4";
  };
  networking.hostId = "deadbeef";
  boot.zfs.forceImportRoot = false;

  users.users.ada = {
    isNormalUser = true;
    hashedPasswordFile = "/var/lib/attic/ada";
    extraGroups = [ "wheel" ];
    openssh.authorizedKeys.keys = [
      "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIG9uZSBvZiBub2JvZHksIGZvciB0aGUgZXhhbXBsZXMh ada@attic"
    ];
  };
  security.sudo.wheelNeedsPassword = true;
  services = {
    openssh = {
      enable = true;
      ports = [ 2222 ];
      settings.PermitRootLogin = "no";
      settings.PasswordAuthentication = true;
    };
    chrony.enable = true;
    harmonia.cache.settings.bind = "10.0.0.5:5050";
    avahi.enable = false;

    prometheus = {
      enable = true;
      port = 9999;
      listenAddress = "10.0.0.5";
      retentionTime = "2y";
      checkConfig = false;
      globalConfig = {
        scrape_interval = "1m";
        external_labels.host = "attic-rack-2";
      };
      scrapeConfigs = [
        {
          job_name = "router";
          static_configs = [ { targets = [ "router:9100" ]; } ];
        }
      ];
      exporters.node = {
        enable = true;
        listenAddress = "0.0.0.0";
        port = 9111;
        enabledCollectors = [ "processes" ];
      };
    };
    grafana = {
      enable = true;
      settings = {
        server.http_port = 8080;
        server.http_addr = "0.0.0.0";
        security.secret_key = "$__file{/var/lib/attic/key}";
        security.admin_password = "$__file{/var/lib/attic/password}";
        "auth.anonymous".enabled = true;
        analytics.reporting_enabled = true;
      };
      provision.datasources.settings.datasources = [
        {
          name = "Loki";
          type = "loki";
          url = "http://loki:3100";
          isDefault = lib.mkForce true;
        }
      ];
    };
  };
  powerManagement.cpuFreqGovernor = "schedutil";
  zramSwap.enable = true;
  nix.gc.automatic = false;
  nix.optimise.automatic = false;
}
