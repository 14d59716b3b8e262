# What every other module of ours asks of the machine, said once.
{
  config,
  lib,
  options,
  pkgs,
  ...
}:
let
  inherit (import ./. { inherit lib config; }) check switch;
  cfg = config.orin.board;
  # Without JetPack's NixOS module these options do not exist.
  jetpack = config.hardware.nvidia-jetpack or { enable = false; };
  onJetpack = options.hardware ? nvidia-jetpack && jetpack.enable;
  inherit (pkgs.stdenv.hostPlatform) system;
  capabilities = pkgs.config.cudaCapabilities or [ ];

  # The first thing that is wrong, alone: the others would follow from it.
  firstWrong = lib.findFirst (rule: !rule.assertion) null [
    (check.demand (system == "aarch64-linux") ''
      the system is ${system}, a Jetson Orin is aarch64-linux.
      Set `nixpkgs.hostPlatform = "aarch64-linux"`; on a machine that only imitates a board
      set `orin.board.check = false`.'')
    (check.demand onJetpack ''
      JetPack is not enabled, so there is no nvgpu driver.
      Import `jetpack-nixos.nixosModules.default` and set `hardware.nvidia-jetpack.enable = true`,
      or build the host with `tinygrad-orin.lib.mkOrin`.'')
    (check.demand (!lib.hasPrefix "xavier" jetpack.som) ''
      hardware.nvidia-jetpack.som is "${jetpack.som}", whose GPU is sm_72 and whose last JetPack
      is 5: nothing here runs on it. An Orin's is "orin-agx", "orin-nx" or "orin-nano".'')
    (check.demand (jetpack.majorVersion != "5") ''
      hardware.nvidia-jetpack.majorVersion is "5" (Jetson Linux r35), whose nvgpu
      has other device nodes and ioctls. Set it to "6" or "7" and update the board's firmware first:
      https://github.com/anduril/jetpack-nixos#updating-firmware-from-device'')
    (check.demand (lib.hasPrefix "orin-" jetpack.som) ''
      hardware.nvidia-jetpack.som is "${jetpack.som}", which is no Orin.
      Set it to the module that you have, as in `hardware.nvidia-jetpack.som = "orin-agx"`.'')
    (check.demand (config.hardware.graphics.enable) ''
      hardware.graphics.enable is false, so /run/opengl-driver/lib has no libcuda.so.
      Set `hardware.graphics.enable = true`.'')
    (check.demand (!(pkgs.config.cudaSupport or false) || lib.elem "8.7" capabilities) ''
      nixpkgs.config.cudaCapabilities is [ ${toString capabilities} ], an Orin is 8.7:
      llama.cpp would start without a kernel for this GPU.
      Set `nixpkgs.config.cudaCapabilities = [ "8.7" ]`, or leave it to JetPack's module.'')
  ];
in
{
  options.orin.board = {
    required = lib.mkOption {
      type = lib.types.bool;
      default = false;
      internal = true;
      description = "Whether a module is on that needs a board. The modules set it.";
    };

    check = switch true ''
      Whether to insist that this machine is a Jetson Orin with JetPack 6 or 7. Off for
      machines that only imitate one: virtual machines and simulators.
    '';
  };

  config = lib.mkIf (cfg.required && cfg.check) {
    assertions = lib.optional (firstWrong != null) firstWrong;
  };
}
