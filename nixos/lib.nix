# What a flake of one's own calls.
{
  self,
  nixpkgs,
  jetpack-nixos,
  disko,
}:
let
  inherit (nixpkgs) lib;
  flash = import ./install/flash.nix { inherit lib self jetpack-nixos; };
  layout = import ./install/layout.nix { inherit lib disko; };
  installer = import ./install/installer.nix {
    inherit
      nixpkgs
      jetpack-nixos
      layout
      sources
      ;
  };

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
            # The flakes that made this host: a board rebuilds after a garbage collection, without their addresses.
            system.extraDependencies = sources self;
            nixpkgs.hostPlatform = system;
            # Packages that a host brings have been configured.
            nixpkgs.config = lib.mkIf (!options.nixpkgs.pkgs.isDefined) { allowUnfree = true; };
            hardware.nvidia-jetpack = {
              enable = true;
              som = lib.mkDefault som;
              carrierBoard = lib.mkDefault carrierBoard;
            };
            hardware.graphics.enable = true;
          }
        )
      ]
    ++ modules;

  # Every flake that a flake's lock names, and itself.
  sources =
    flake:
    let
      walk =
        found: input:
        if lib.elem input.outPath found then
          found
        else
          lib.foldl walk (found ++ [ input.outPath ]) (lib.attrValues (input.inputs or { }));
    in
    walk [ ] flake;

  # A NixOS configuration of a Jetson Orin, of the same arguments.
  mkOrin = arguments: lib.nixosSystem { modules = orinModules arguments; };
in
{
  inherit mkOrin orinModules;

  # The image of a USB stick that installs a host: `mkInstaller { flake = self; host = "my-orin"; }`. It carries
  # the built system; with `system = "x86_64-linux"` that machine cross-compiles a stick that does not.
  mkInstaller = arguments: (installer arguments).config.system.build.isoImage;

  # The program that makes the file systems of a host's disk: `installerDisk pkgs host`.
  installerDisk = pkgs: host: layout.script pkgs host.config.orin.host.disk;

  # What flashes a board's firmware, as jetpack-nixos of flake.lock has it: `nix run .#flash -- BOARD`.
  flashScripts = flash.scripts;
  flashProgram = flash.program;
}
