# The templates are the examples of the docs: their hosts evaluate, with this flake as input.
{ self }:
let
  inherit (self.inputs.nixpkgs) lib;
  inputs = {
    inherit (self.inputs) nixpkgs;
    tinygrad-orin = self;
  };
  hostsOf = folder: (import (folder + "/flake.nix")).outputs inputs;
  inherit ((hostsOf ../../templates/default).nixosConfigurations) my-orin;
  fleet = hostsOf ../../templates/fleet;

  # What is wrong, one string each. orin-2 is orin-3 on another module, and a machine takes seconds.
  hosts = removeAttrs fleet.nixosConfigurations [ "orin-2" ] // {
    inherit my-orin;
  };
in
{
  hive = fleet.colmena;
  wrong = lib.concatLists (
    lib.mapAttrsToList (
      name: host:
      map (rule: "${name}: ${rule.message}") (
        lib.filter (rule: !rule.assertion) host.config.assertions
      )
    ) hosts
  );
}
