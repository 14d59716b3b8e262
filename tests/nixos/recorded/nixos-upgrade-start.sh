/nix/store/any/bin/nixos-rebuild switch --refresh --flake /etc/nixos
