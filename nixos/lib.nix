# What a flake of one's own calls.
{
  self,
  nixpkgs,
  jetpack-nixos,
}:
let
  inherit (nixpkgs) lib;

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
        {
          networking.hostName = lib.mkDefault hostName;
          nixpkgs.hostPlatform = system;
          nixpkgs.config.allowUnfree = true;
          hardware.nvidia-jetpack = {
            enable = true;
            inherit som carrierBoard;
          };
          hardware.graphics.enable = true;
        }
      ]
    ++ modules;

  # A NixOS configuration of a Jetson Orin, of the same arguments.
  mkOrin = arguments: lib.nixosSystem { modules = orinModules arguments; };
in
{
  inherit mkOrin orinModules;

  # The options of our modules as Markdown: the second half of docs/nixos.md.
  optionsMarkdown = import ./options.nix { inherit self nixpkgs; };
}
