{
  description = "My Jetson Orin";

  # Where you have tinygrad-orin from. A board fetches it from there: the path of a checkout on your desktop
  # would mean nothing to it.
  inputs.tinygrad-orin.url = "github:REPLACE_ME/tinygrad-orin";

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
