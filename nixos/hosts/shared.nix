# A host with the packages of another, which then are evaluated once for both: a third of the time and
# half of the memory. What would need packages of its own is refused, and never dropped in silence.
other:
{ config, lib, ... }:
let
  # JetPack's packages depend on these.
  board =
    host:
    lib.getAttrs [
      "majorVersion"
      "som"
      "carrierBoard"
      "super"
    ] host.config.hardware.nvidia-jetpack;
  host = config.networking.hostName;
  advice = "the hosts of nixos/hosts share their packages; write it into site.nix, which all of them have";
in
{
  # What NixOS asks of the packages that it is given: the overlays of the other host are in them.
  nixpkgs.pkgs = other.pkgs // {
    appendOverlays =
      overlays:
      lib.throwIf (
        lib.length overlays != lib.length other.config.nixpkgs.overlays
      ) "host ${host}: nixpkgs.overlays has one of this host alone: ${advice}" other.pkgs;
  };
  # It would set nixpkgs.config, which these packages have.
  hardware.nvidia-jetpack.configureCuda = false;
  assertions = [
    {
      assertion = board { inherit config; } == board other;
      message = "host ${host}: hardware.nvidia-jetpack is not that of ${other.config.networking.hostName}: ${advice}.";
    }
  ];
}
