# The templates are the examples of the docs: their hosts evaluate, with this flake as input.
{ self, pkgs }:
let
  inherit (pkgs) lib;
  inputs = {
    inherit (self.inputs) nixpkgs;
    tinygrad-orin = self;
  };
  hostsOf = folder: (import (folder + "/flake.nix")).outputs inputs;
  hosts = {
    inherit ((hostsOf ../../templates/default).nixosConfigurations) my-orin;
    # The other board of the fleet is this one without a server.
    inherit ((hostsOf ../../templates/fleet).nixosConfigurations) orin-2;
  };
  # The derivations' names, without a demand to build them.
  evaluated = lib.mapAttrs (
    _: host: builtins.unsafeDiscardStringContext host.config.system.build.toplevel.drvPath
  ) hosts;
in
pkgs.writeText "templates" (lib.generators.toJSON { } evaluated)
