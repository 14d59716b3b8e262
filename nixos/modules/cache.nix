# What this board has built, for other boards: harmonia with a key of its own.
{
  config,
  lib,
  options,
  ...
}:
let
  cfg = config.orin.cache;
  host = config.networking.hostName;
  inherit (import ./common { inherit lib config; }) check listening;
  folder = "/var/lib/orin-cache";
  settings = {
    enable = true;
    signKeyPaths = [ "${folder}/secret-key" ];
    # harmonia's module has a default of its own for this.
    settings.bind = lib.mkOverride 900 (listening.socket cfg.listenAddress cfg.port);
  };
in
{
  imports = [ ./common/ports.nix ];

  options.orin.cache = {
    enable = lib.mkEnableOption "a binary cache of what this board has built";

    listenAddress = listening.listenAddress "The cache's address.";

    port = listening.port 5000 5001 "The cache's port.";

    openFirewall = listening.openFirewall "the cache's port";
  };

  config = lib.mkIf cfg.enable {
    assertions = listening.rules "the cache" "orin.cache" "listenAddress" cfg ++ [
      # systemd opens its socket.
      (check.rule "orin.cache.listenAddress" cfg.listenAddress (
        lib.hasInfix ":" cfg.listenAddress || !check.matches ".*[A-Za-z].*" cfg.listenAddress
      ) ''systemd takes numbers here and no name; write "127.0.0.1", "0.0.0.0" or "::"'')
    ];
    orin.ports."orin.cache.port" = cfg.port;
    networking.firewall.allowedTCPPorts = lib.optional cfg.openFirewall cfg.port;

    # The option's name differs between releases of nixpkgs.
    services.harmonia = if options.services.harmonia ? cache then { cache = settings; } else settings;

    systemd.services.orin-cache-key = {
      description = "The key that this board signs what it has built with";
      requiredBy = [ "harmonia.service" ];
      before = [ "harmonia.service" ];
      path = [ config.nix.package ];
      serviceConfig = {
        Type = "oneshot";
        RemainAfterExit = true;
        StateDirectory = baseNameOf folder;
        StateDirectoryMode = "0700";
        UMask = "0077";
        PrivateNetwork = true;
        ProtectHome = true;
        ProtectSystem = "strict";
        NoNewPrivileges = true;
      };
      script = ''
        cd ${folder}
        # These open no store, which this unit may not write.
        key() { nix --extra-experimental-features nix-command key "$@"; }
        if [ ! -s secret-key ]; then
          key generate-secret --key-name ${lib.escapeShellArg "${host}-1"} >new
          key convert-secret-to-public <new >public-key
          mv new secret-key
        fi
        echo "on the other boards: orin.host.caches.\"http://${host}:${toString cfg.port}\" = \"$(cat public-key)\";"
      '';
    };
  };
}
