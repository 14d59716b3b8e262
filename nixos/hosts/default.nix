# `nixosConfigurations`. Edit site.nix, then `nixos-rebuild switch --flake .#orin`.
{ mkOrin }:
let
  host =
    hostName:
    mkOrin {
      inherit hostName;
      modules = [
        ./site.nix
        (./. + "/${hostName}")
      ];
    };
in
rec {
  orin = host "orin";
  orin-minimal = host "orin-minimal";
  orin-llm = host "orin-llm";

  # The old name of `orin`.
  nixos-telemetry = orin;
}
