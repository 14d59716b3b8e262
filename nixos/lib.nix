# What a flake of one's own calls.
inputs@{
  self,
  nixpkgs,
  jetpack-nixos,
  disko,
}:
let
  inherit (nixpkgs) lib;
  flash = import ./install/flash.nix { inherit lib self jetpack-nixos; };
  layouts = import ./install/layout.nix { inherit lib disko; };
  installer = import ./install/installer.nix inputs;

  /*
    The modules of a Jetson Orin: JetPack, all of ours, and yours. For tools that evaluate a machine
    themselves, as colmena does.

    hostName: the name of the machine.
    modules: what makes it different from others.
    som: "orin-agx", "orin-agx-industrial", "orin-nx" or "orin-nano".
    carrierBoard: "devkit", or "generic" for any other.
    system: "aarch64-linux"; there is no other Orin.
  */
  orinModules =
    {
      hostName,
      modules ? [ ],
      som ? "orin-agx",
      carrierBoard ? "devkit",
      system ? "aarch64-linux",
    }:
    lib.throwIf (system != "aarch64-linux")
      "mkOrin: host ${hostName}: system is ${system}, but a Jetson Orin is aarch64-linux: leave it out"
      [
        jetpack-nixos.nixosModules.default
        self.nixosModules.default
        (
          { options, ... }:
          {
            networking.hostName = lib.mkDefault hostName;
            nixpkgs.hostPlatform = system;
            # Packages that a host brings have been configured.
            nixpkgs.config = lib.mkIf (!options.nixpkgs.pkgs.isDefined) { allowUnfree = true; };
            hardware.nvidia-jetpack = {
              enable = true;
              inherit som carrierBoard;
            };
            hardware.graphics.enable = true;
          }
        )
      ]
    ++ modules;

  # A NixOS configuration of a Jetson Orin, of the same arguments.
  mkOrin = arguments: lib.nixosSystem { modules = orinModules arguments; };
in
{
  inherit mkOrin orinModules;

  # The image of a USB stick that installs a host: `mkInstaller { flake = self; host = "my-orin"; }`, and
  # `system = "x86_64-linux"` where that machine builds it.
  mkInstaller = arguments: (installer arguments).config.system.build.isoImage;

  # The programs that make the file systems of a host's disk: `installerDisks pkgs host`.
  installerDisks = pkgs: host: layouts.scripts pkgs host.config.orin.host.disk;

  # What flashes a board's firmware, as jetpack-nixos of flake.lock has it: `nix run .#flash -- BOARD`.
  flashScripts = flash.scripts;
  flashProgram = flash.program;

  # The options of our modules as Markdown: docs/reference/nixos-options.md.
  optionsMarkdown = import ./options.nix { inherit self nixpkgs; };
}
