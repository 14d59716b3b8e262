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
  # The other board of the fleet is this one without a server.
  inherit (fleet.nixosConfigurations) orin-2;

  # A whole machine takes a gigabyte to evaluate, its assertions half of that.
  wrong = lib.mapAttrs (
    _: host: map (rule: rule.message) (lib.filter (rule: !rule.assertion) host.config.assertions)
  ) { inherit my-orin orin-2; };
in
assert lib.assertMsg (lib.all (messages: messages == [ ]) (lib.attrValues wrong)) (
  "templates: " + lib.generators.toPretty { } wrong
);
pkgs.runCommand "templates" { passthru.hive = fleet.colmena; } "touch $out"
