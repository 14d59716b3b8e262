# The templates are the examples of the docs: their hosts evaluate, with this flake as input.
{ self }:
let
  inherit (self.inputs) nixpkgs;
  inherit (nixpkgs) lib;

  # The packages of a machine take seconds; the one instance of its system will do for options.
  nixosSystem =
    arguments:
    lib.nixosSystem (
      arguments
      // {
        modules = arguments.modules ++ [
          (
            { config, ... }:
            let
              pkgs = self.legacyPackages.${config.nixpkgs.hostPlatform.system};
            in
            {
              nixpkgs.pkgs = pkgs // {
                appendOverlays = _: pkgs;
              };
              nixpkgs.config = lib.mkForce { };
            }
          )
        ];
      }
    );
  inputs = {
    nixpkgs = nixpkgs // {
      lib = lib // {
        inherit nixosSystem;
      };
    };
    tinygrad-orin = self // {
      lib = self.lib // {
        mkOrin = arguments: nixosSystem { modules = self.lib.orinModules arguments; };
      };
    };
  };
  hostsOf = folder: (import (folder + "/flake.nix")).outputs inputs;
  inherit ((hostsOf ../../templates/default).nixosConfigurations) my-orin;
  fleet = hostsOf ../../templates/fleet;
  # colmena imports each node's modules, and reads `deployment` with an option of its own.
  nodes = lib.mapAttrs (
    _: node:
    nixosSystem {
      modules = [
        node
        { options.deployment = lib.mkOption { type = lib.types.attrs; }; }
      ];
    }
  ) (removeAttrs fleet.colmena [ "meta" ]);
  report = {
    litellm = nodes.monitor.config.services.litellm.settings;
    hive = lib.mapAttrs (_: host: host.config.deployment) nodes;
    alone = lib.attrNames fleet.nixosConfigurations;
    # What is wrong, one string each.
    wrong =
      let
        monitor = nodes.monitor.config;
        site = monitor.services.nginx.virtualHosts."monitor.local";
        shut = {
          "Grafana on its loopback" = monitor.services.grafana.settings.server.http_addr == "127.0.0.1";
          "a password of its own" =
            monitor.services.grafana.settings.security.admin_password
            == "$__file{/run/credentials/grafana.service/grafana-admin-password}";
          "Prometheus on its loopback" = monitor.services.prometheus.listenAddress == "127.0.0.1";
          "two ports, for the boards and with a key for clients" =
            toString (lib.sort lib.lessThan monitor.networking.firewall.allowedTCPPorts) == "22 4000 9443";
          "TLS and a password at that port" = site.onlySSL && site.basicAuthFile != null;
          "no administrator's page" = monitor.services.litellm.environment.DISABLE_ADMIN_UI == "True";
          "no passwords of ssh" = !monitor.services.openssh.settings.PasswordAuthentication;
        };
      in
      map (name: "monitor: not ${name}") (lib.attrNames (lib.filterAttrs (_: ok: !ok) shut))
      ++ lib.concatLists (
        lib.mapAttrsToList (
          name: host:
          map (rule: "${name}: ${rule.message}") (lib.filter (rule: !rule.assertion) host.config.assertions)
        ) (nodes // { inherit my-orin; })
      );
  };
in
# To the end at once: no machine stays in memory for a string of it.
builtins.deepSeq report report
