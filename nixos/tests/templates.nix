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

  # A whole machine takes a gigabyte to evaluate. The fleet's is evaluated to its derivation (whose
  # name is all that is kept: nothing is built), the other to its assertions.
  wrong = map (rule: rule.message) (lib.filter (rule: !rule.assertion) my-orin.config.assertions);
in
assert lib.assertMsg (wrong == [ ]) "templates/default: ${toString wrong}";
pkgs.runCommand "templates"
  {
    passthru.hive = fleet.colmena;
    evaluated = builtins.unsafeDiscardStringContext orin-2.config.system.build.toplevel.drvPath;
  }
  ''
    echo $evaluated >$out
  ''
