{
  description = "My Jetson Orin";

  # Where you have tinygrad-orin from: a checkout as here, or github:OWNER/tinygrad-orin.
  inputs.tinygrad-orin.url = "git+file:///home/me/tinygrad-orin";

  outputs =
    { tinygrad-orin, ... }:
    {
      # nixos-rebuild switch --flake .#my-orin --target-host root@my-orin --build-host root@my-orin
      nixosConfigurations.my-orin = tinygrad-orin.lib.mkOrin {
        hostName = "my-orin";
        # Also: "orin-nx", "orin-nano", with carrierBoard = "generic" on a board that is no devkit.
        som = "orin-agx";
        modules = [ ./configuration.nix ];
      };
    };
}
