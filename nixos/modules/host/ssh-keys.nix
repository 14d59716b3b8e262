# Public keys that `ssh-keygen -lf` takes.
rec {
  # How the base64 of each kind begins, and how many letters follow (RFC 4253, 6.6; RFC 5656, 3.1). A key that
  # is cut is seen by them but for RSA's, whose length is its owner's choice.
  bodies = {
    ssh-ed25519 = "AAAAC3NzaC1lZDI1NTE5AAAAI.{43}";
    ssh-rsa = "AAAAB3NzaC1yc2EAAAA.{185,}";
    ecdsa-sha2-nistp256 = "AAAAE2VjZHNhLXNoYTItbmlzdHAyNTYAAAAIbmlzdHAyNTYAAABBB.{87}";
    ecdsa-sha2-nistp384 = "AAAAE2VjZHNhLXNoYTItbmlzdHAzODQAAAAIbmlzdHAzODQAAABhB.{131}";
    ecdsa-sha2-nistp521 = "AAAAE2VjZHNhLXNoYTItbmlzdHA1MjEAAAAIbmlzdHA1MjEAAACFB.{179}";
  };
  isWhole = kind: body: builtins.match (bodies.${kind} or ".+") body != null;

  # ssh-keygen itself sees the rest when a system is built, or a stick that installs it.
  checked =
    pkgs: keys:
    pkgs.buildPackages.runCommand "ssh-keys" { nativeBuildInputs = [ pkgs.buildPackages.openssh ]; } ''
      for key in ${pkgs.lib.escapeShellArgs keys}; do
        echo "$key" >key
        ssh-keygen -lf key || { echo "orin.host.sshKeys: $key: copy the whole line of ~/.ssh/id_ed25519.pub"; exit 1; }
      done
      touch $out
    '';
}
