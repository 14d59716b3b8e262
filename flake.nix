{
  description = "tinygrad on the NVIDIA Jetson Orin: its own GPU driver, honest benchmarks, telemetry";

  inputs = {
    # The branch of jetpack-nixos, newer than in its lock, which `nix flake update` takes as it is.
    nixpkgs.url = "github:nixos/nixpkgs/nixos-26.05";
    jetpack-nixos.url = "github:anduril/jetpack-nixos";
    jetpack-nixos.inputs.nixpkgs.follows = "nixpkgs";
    # The installer's partitions.
    disko = {
      url = "github:nix-community/disko";
      flake = false;
    };
  };

  outputs =
    inputs@{
      self,
      nixpkgs,
      jetpack-nixos,
      ...
    }:
    let
      # nixpkgs is evaluated once per system, and every output below shares it. On aarch64 it is the hosts'.
      pkgsFor = {
        aarch64-linux = self.nixosConfigurations.orin-minimal.pkgs;
        # An Orin is compute capability 8.7, and nixpkgs knows that one on aarch64 alone: here llama.cpp
        # stays the build for the CPU that the public cache has. tinygrad compiles for CUDA everywhere,
        # because NVRTC needs no GPU.
        x86_64-linux = import nixpkgs {
          system = "x86_64-linux";
          overlays = [
            jetpack-nixos.overlays.default
            self.overlays.default
          ];
          # CUDA is unfree.
          config.allowUnfree = true;
        };
      };
      forEach = file: nixpkgs.lib.mapAttrs (_: pkgs: import file { inherit self pkgs; }) pkgsFor;
    in
    {
      overlays.default = import ./overlays;
      # nixpkgs as configured here: `nix build .#python3Packages.tinygrad`. And what takes as long as a
      # machine to evaluate, and no part of `nix flake check`: `nix build .#installer`.
      legacyPackages = nixpkgs.lib.mapAttrs (
        system: pkgs:
        pkgs
        // {
          installer = self.lib.mkInstaller {
            flake = self;
            host = "orin-minimal";
          };
          installer-cross = self.lib.mkInstaller {
            inherit system;
            flake = self;
            host = "orin-minimal";
          };
          optionsDoc = import ./nixos/options.nix { inherit self pkgs; };
          installerDisk = self.lib.installerDisk pkgs self.nixosConfigurations.orin-minimal;
        }
      ) pkgsFor;
      packages = forEach ./overlays/packages.nix;
      apps = forEach ./overlays/apps.nix;
      devShells = forEach ./shells;
      checks = forEach ./nixos/tests;
      formatter = nixpkgs.lib.mapAttrs (_: pkgs: pkgs.nixfmt-tree) pkgsFor;

      lib = import ./nixos/lib.nix inputs;
      nixosModules = import ./nixos/modules { overlay = self.overlays.default; };
      nixosConfigurations = import ./nixos/hosts { inherit (self.lib) mkOrin; };
      templates = import ./templates;
    };
}
