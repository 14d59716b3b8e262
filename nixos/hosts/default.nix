# `nixosConfigurations`. Edit site.nix, then `nixos-rebuild switch --flake .#orin`.
{ mkOrin }:
let
  host =
    hostName: more:
    mkOrin {
      inherit hostName;
      modules = [
        ./site.nix
        (./. + "/${hostName}")
      ]
      ++ more;
    };
  # The packages are those of orin-minimal, evaluated once for all.
  shared = [ (import ./shared.nix orin-minimal) ];
  orin-minimal = host "orin-minimal" [ ];
in
{
  inherit orin-minimal;
  orin = host "orin" shared;
  orin-llm = host "orin-llm" shared;
}
