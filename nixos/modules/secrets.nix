# Files with secrets that options name: [ { option; file; advice ? } ], of which those that are null do
# not count. `assertions` for the evaluation, `checks` for the switch.
{ lib, host }:
given:
let
  paths = import ./paths.nix { inherit lib; };
  named = lib.filter (secret: secret.file != null) given;
  # What a tool such as agenix or sops-nix puts there comes with the switch itself.
  before = lib.filter (secret: !lib.hasPrefix "/run/" (toString secret.file)) named;
in
{
  assertions = map (
    secret:
    paths.file {
      inherit host;
      inherit (secret) option;
      path = secret.file;
      why = "which everyone can read";
      example = "/var/lib/secrets/${lib.last (lib.splitString "." secret.option)}";
    }
  ) named;

  # Each has to lie on the board before a system that reads it becomes the running one.
  checks =
    name:
    lib.optionalAttrs (before != [ ]) {
      ${name} = lib.concatMapStrings (
        secret:
        let
          file = toString secret.file;
        in
        ''
          # nixos-install switches in a chroot, before anybody can have written it.
          if [ ! -s ${lib.escapeShellArg file} ] && ! systemd-detect-virt --chroot 2>/dev/null; then
            echo "${secret.option}: there is no ${file} on this board. Write it first:"
            echo "  ${
              secret.advice or "head -c 32 /dev/urandom | base64 | sudo install -D -m 0400 /dev/stdin ${file}"
            }"
            exit 1
          fi
        ''
      ) before;
    };
}
