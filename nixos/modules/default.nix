# `nixosModules`: each alone, or all of them with the overlay that their packages come from.
{ overlay }:
let
  modules = {
    tinygrad = ./tinygrad.nix;
    performance = ./performance;
    telemetry = ./telemetry;
    llm-server = ./llm-server;
    host = ./host;
    upgrade = ./upgrade;
    cache = ./cache.nix;
    backup = ./backup.nix;
  };
in
modules
// {
  default = {
    imports = builtins.attrValues modules;
    nixpkgs.overlays = [ overlay ];
  };
}
