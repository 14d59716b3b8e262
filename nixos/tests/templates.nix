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
  report = {
    hive = lib.attrNames fleet.colmena;
    # What is wrong, one string each.
    wrong = lib.concatLists (
      lib.mapAttrsToList (
        name: host:
        map (rule: "${name}: ${rule.message}") (lib.filter (rule: !rule.assertion) host.config.assertions)
      ) (fleet.nixosConfigurations // { inherit my-orin; })
    );
  };
in
# To the end at once: no machine stays in memory for a string of it.
builtins.deepSeq report report
