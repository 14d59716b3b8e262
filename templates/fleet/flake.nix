{
  description = "My Jetson Orins";

  inputs = {
    # Where you have tinygrad-orin from: a checkout as here, or github:OWNER/tinygrad-orin.
    tinygrad-orin.url = "git+file:///home/me/tinygrad-orin";
    nixpkgs.follows = "tinygrad-orin/nixpkgs";
  };

  outputs =
    { nixpkgs, tinygrad-orin, ... }:
    let
      inherit (nixpkgs) lib;

      # What differs between the boards; all else is common.nix.
      boards = {
        orin-1.tags = [ "bench" ];
        orin-2 = {
          tags = [ "llm" ];
          modules = [ ./llm.nix ];
        };
      };

      modulesOf =
        hostName: board:
        tinygrad-orin.lib.orinModules {
          inherit hostName;
          modules = [ ./common.nix ] ++ board.modules or [ ];
        };
    in
    {
      # One board: nixos-rebuild switch --flake .#orin-1 --target-host root@orin-1
      nixosConfigurations = lib.mapAttrs (
        hostName: board: lib.nixosSystem { modules = modulesOf hostName board; }
      ) boards;

      # All of them: nix run nixpkgs#colmena -- apply, or `apply --on @llm`.
      colmena = {
        meta.nixpkgs = import nixpkgs { system = "aarch64-linux"; };
      }
      // lib.mapAttrs (hostName: board: {
        imports = modulesOf hostName board;
        deployment = {
          targetHost = hostName;
          inherit (board) tags;
          # CUDA packages do not cross-compile: each board builds, or takes from the cache.
          buildOnTarget = true;
        };
      }) boards;
    };
}
