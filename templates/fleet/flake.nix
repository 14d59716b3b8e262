{
  description = "My Jetson Orins";

  inputs = {
    # Where you have tinygrad-orin from. A board fetches it from there: the path of a checkout on your desktop
    # would mean nothing to it.
    tinygrad-orin.url = "github:REPLACE_ME/tinygrad-orin";
    nixpkgs.follows = "tinygrad-orin/nixpkgs";
  };

  outputs =
    { nixpkgs, tinygrad-orin, ... }:
    let
      inherit (nixpkgs) lib;

      # What differs between the boards; all else is common.nix.
      boards = {
        orin-1 = {
          tags = [ "bench" ];
          modules = [ ./cache.nix ];
        };
        orin-2 = {
          tags = [ "llm" ];
          modules = [ ./llm.nix ];
        };
        orin-3 = {
          som = "orin-nano";
          super = true;
          tags = [ "llm" ];
          modules = [ ./llm.nix ];
        };
      };

      modulesOf =
        hostName:
        {
          modules,
          som ? "orin-agx",
          super ? false,
          ...
        }:
        tinygrad-orin.lib.orinModules {
          inherit hostName som;
          modules = [
            ./common.nix
            { hardware.nvidia-jetpack = { inherit super; }; }
          ]
          ++ modules;
        };
      # A machine that is no Orin: it keeps and shows what the boards measure.
      monitor = [
        ./monitor.nix
        ./gateway.nix
        {
          imports = [ tinygrad-orin.nixosModules.default ];
          networking.hostName = "monitor";
          nixpkgs.hostPlatform = "x86_64-linux";
        }
      ];
    in
    {
      # One machine: nixos-rebuild switch --flake .#orin-1 --target-host root@orin-1.local
      nixosConfigurations =
        lib.mapAttrs (hostName: board: lib.nixosSystem { modules = modulesOf hostName board; }) boards
        // {
          monitor = lib.nixosSystem { modules = monitor; };
        };

      # All of them: nix run nixpkgs#colmena -- apply, or `apply --on @llm`.
      colmena = {
        meta = {
          nixpkgs = import nixpkgs { system = "aarch64-linux"; };
          nodeNixpkgs.monitor = import nixpkgs { system = "x86_64-linux"; };
        };
        monitor = {
          imports = monitor;
          deployment = {
            targetHost = "monitor.local";
            tags = [ "monitor" ];
          };
        };
      }
      // lib.mapAttrs (hostName: board: {
        imports = modulesOf hostName board;
        deployment = {
          targetHost = "${hostName}.local";
          inherit (board) tags;
          # CUDA packages do not cross-compile: each board builds, or takes from the cache.
          buildOnTarget = true;
        };
      }) boards;
    };
}
