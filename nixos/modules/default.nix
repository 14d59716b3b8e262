# `nixosModules`: each alone, or all of them with the overlay that their packages come from.
{ overlay }:
let
  modules = {
    tinygrad = ./tinygrad.nix;
    performance = ./performance.nix;
    telemetry = ./telemetry.nix;
    llm-server = ./llm-server.nix;
    host = ./host.nix;
    upgrade = ./upgrade.nix;
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
