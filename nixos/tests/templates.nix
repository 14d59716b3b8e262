# The templates are the examples of the docs: their hosts evaluate, with this flake as input.
{ self, pkgs }:
let
  inherit (pkgs) lib;
  inputs = {
    inherit (self.inputs) nixpkgs;
    tinygrad-orin = self;
  };
  hostsOf = folder: (import (folder + "/flake.nix")).outputs inputs;
  inherit ((hostsOf ../../templates/default).nixosConfigurations) my-orin;
  fleet = hostsOf ../../templates/fleet;

  # A whole machine takes half a gigabyte to evaluate, so a board's assertions do.
  wrong = lib.mapAttrs (
    _: host: map (rule: rule.message) (lib.filter (rule: !rule.assertion) host.config.assertions)
  ) (fleet.nixosConfigurations // { inherit my-orin; });
in
assert lib.assertMsg (lib.all (messages: messages == [ ]) (lib.attrValues wrong)) (
  "templates: " + lib.generators.toPretty { } wrong
);
pkgs.runCommand "templates" {
  passthru = {
    hive = fleet.colmena;
    hosts = lib.attrNames wrong;
    modes = lib.mapAttrs (_: host: host.config.orin.performance.powerMode) (
      removeAttrs fleet.nixosConfigurations [ "monitor" ]
    );
  };
} "touch $out"
