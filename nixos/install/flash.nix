# `flashScripts` and the program behind `nix run .#flash`: jetpack-nixos' own scripts for JetPack 6 and 7, from
# the revision that flake.lock has. NVIDIA's tools are programs for x86_64, so it is the only system.
{
  lib,
  self,
  jetpack-nixos,
}:
let
  # "flash-orin-nx-super-devkit" is of JetPack 6; those of other releases end in -jp5 and -jp7.
  prefix = "flash-";
  # JetPack 7 has nothing for Xavier NX's carrier board: that one does not evaluate.
  ours =
    name:
    lib.hasPrefix "${prefix}orin-" name
    && !lib.hasSuffix "-jp5" name
    && !lib.hasSuffix "xavierNxDevkit-jp7" name;
in
rec {
  # One a board, by its name: { orin-agx-devkit = derivation; ... }.
  scripts = lib.mapAttrs' (name: lib.nameValuePair (lib.removePrefix prefix name)) (
    lib.filterAttrs (name: _: ours name) jetpack-nixos.packages.x86_64-linux
  );

  program =
    pkgs:
    let
      releases = lib.genAttrs (lib.attrNames scripts) (
        board:
        (if lib.hasSuffix "-jp7" board then pkgs.nvidia-jetpack7 else pkgs.nvidia-jetpack6)
        .l4tMajorMinorPatchVersion
      );
    in
    pkgs.writeShellApplication {
      name = "flash";
      runtimeEnv = {
        ORIN_FLAKE = "path:${self}";
        ORIN_RELEASES = toString (lib.mapAttrsToList (board: of: "${board}=${of}") releases);
        ORIN_REVISION = jetpack-nixos.rev or "without a commit";
      };
      text = lib.readFile ./flash.sh;
    };
}
