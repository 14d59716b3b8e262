{
  description = "tinygrad on the NVIDIA Jetson Orin: its own GPU driver, honest benchmarks, telemetry";

  inputs = {
    jetpack-nixos.url = "github:anduril/jetpack-nixos";
    # What jetpack-nixos is tested with.
    nixpkgs.follows = "jetpack-nixos/nixpkgs";
    # The installer's partitions.
    disko = {
      url = "github:nix-community/disko";
      flake = false;
    };
  };

  outputs =
    {
      self,
      nixpkgs,
      jetpack-nixos,
      disko,
    }:
    let
      systems = [
        "aarch64-linux"
        "x86_64-linux"
      ];
      # nixpkgs is imported once per system; every output below shares it.
      pkgsFor = nixpkgs.lib.genAttrs systems (
        system:
        import nixpkgs {
          inherit system;
          overlays = [
            jetpack-nixos.overlays.default
            self.overlays.default
          ];
          config = import ./overlays/config.nix { inherit system; };
        }
      );
      forEach = file: nixpkgs.lib.mapAttrs (_: pkgs: import file { inherit self pkgs; }) pkgsFor;
    in
    {
      overlays.default = import ./overlays;
      # nixpkgs as configured here: `nix build .#python3Packages.tinygrad`. And the installer, whose
      # evaluation is a machine's: `nix build .#installer`, not part of `nix flake check`.
      legacyPackages = nixpkgs.lib.mapAttrs (
        system: pkgs:
        pkgs
        // {
          installer = self.lib.mkInstaller {
            inherit system;
            flake = self;
            host = "orin-minimal";
          };
          installerDisks = self.lib.installerDisks pkgs self.nixosConfigurations.orin-minimal;
        }
      ) pkgsFor;
      packages = forEach ./overlays/packages.nix;
      apps = forEach ./overlays/apps.nix;
      devShells = forEach ./shells;
      checks = forEach ./nixos/tests;
      formatter = nixpkgs.lib.mapAttrs (_: pkgs: pkgs.nixfmt-tree) pkgsFor;

      lib = import ./nixos/lib.nix {
        inherit
          self
          nixpkgs
          jetpack-nixos
          disko
          ;
      };
      nixosModules = import ./nixos/modules { overlay = self.overlays.default; };
      nixosConfigurations = import ./nixos/hosts { inherit (self.lib) mkOrin; };
      templates = import ./templates;
    };
}
