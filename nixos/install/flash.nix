# `flashScripts` and the program behind `nix run .#flash`: jetpack-nixos' own scripts for JetPack 6, from
# the revision that flake.lock has. NVIDIA's tools are programs for x86_64, so it is the only system.
{
  lib,
  self,
  jetpack-nixos,
}:
let
  # "flash-orin-nx-super-devkit"; those of other releases end in -jp5 and -jp7.
  prefix = "flash-";
  ours = name: lib.hasPrefix "${prefix}orin-" name && builtins.match ".*-jp[0-9]+" name == null;
in
rec {
  # One a board, by its name: { orin-agx-devkit = derivation; ... }.
  scripts = lib.mapAttrs' (name: lib.nameValuePair (lib.removePrefix prefix name)) (
    lib.filterAttrs (name: _: ours name) jetpack-nixos.packages.x86_64-linux
  );

  program =
    pkgs:
    pkgs.writeShellApplication {
      name = "flash";
      runtimeEnv.ORIN_FIRMWARE = builtins.toJSON {
        flake = "path:${self}";
        release = pkgs.nvidia-jetpack6.l4tMajorMinorPatchVersion;
        revision = jetpack-nixos.rev or "without a commit";
        boards = lib.attrNames scripts;
      };
      text = ''exec ${lib.getExe pkgs.python3} ${./flash.py} "$@"'';
    };
}
