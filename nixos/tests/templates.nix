# The templates are the examples of the docs: each of their hosts evaluates, with this flake as input.
{ self, pkgs }:
let
  inherit (pkgs) lib;
  inputs = {
    inherit (self.inputs) nixpkgs;
    tinygrad-orin = self;
  };
  hostsOf = folder: (import (folder + "/flake.nix")).outputs inputs;
  hosts =
    (hostsOf ../../templates/default).nixosConfigurations
    // (hostsOf ../../templates/fleet).nixosConfigurations;
  # The derivations' names, without a demand to build them.
  evaluated = lib.mapAttrs (
    _: host: builtins.unsafeDiscardStringContext host.config.system.build.toplevel.drvPath
  ) hosts;
in
pkgs.writeText "templates" (lib.generators.toJSON { } evaluated)
