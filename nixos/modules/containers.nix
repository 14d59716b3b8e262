# Containers that see the GPU: podman, and the devices by CDI (`podman run --device nvidia.com/gpu=all`).
{
  config,
  lib,
  options,
  ...
}:
let
  cfg = config.orin.containers;
in
{
  imports = [ ./board.nix ];

  options.orin.containers.enable = lib.mkEnableOption "podman, with the GPU for containers that ask for it";

  config = lib.mkIf cfg.enable {
    orin.board.required = true;
    virtualisation.podman = {
      enable = true;
      dockerCompat = lib.mkDefault (!config.virtualisation.docker.enable);
    };
    # JetPack's module fills in what a Jetson has, and has a default of its own for this.
    hardware = lib.optionalAttrs (options.hardware ? nvidia-container-toolkit) {
      nvidia-container-toolkit.enable = lib.mkOverride 900 true;
    };
  };
}
