# Files with secrets, by the option that names each; those that are null do not count. `assertions` for the
# evaluation, `checks` for the switch.
{ lib, paths }:
{
  files,
  # What to write into them; a random key where it is left out.
  advice ? null,
}:
let
  named = lib.filterAttrs (_: file: file != null) files;
  # What a tool such as agenix or sops-nix puts there comes with the switch itself.
  before = lib.filterAttrs (_: file: !lib.hasPrefix "/run/" file) (lib.mapAttrs (_: toString) named);
in
{
  assertions = lib.mapAttrsToList (
    option: file: paths.secret option file "/var/lib/secrets/${lib.last (lib.splitString "." option)}"
  ) named;

  # Each has to lie on the board before a system that reads it becomes the running one.
  checks =
    name:
    lib.optionalAttrs (before != { }) {
      ${name} = lib.concatStrings (
        lib.mapAttrsToList (option: file: ''
          # nixos-install switches in a chroot, before anybody can have written it.
          if [ ! -s ${lib.escapeShellArg file} ] && ! systemd-detect-virt --chroot 2>/dev/null; then
            echo "${option}: there is no ${file} on this board. Write it first:"
            echo "  ${
              if advice == null then
                "head -c 32 /dev/urandom | base64 | sudo install -D -m 0400 /dev/stdin ${file}"
              else
                advice
            }"
            exit 1
          fi
        '') before
      );
    };
}
