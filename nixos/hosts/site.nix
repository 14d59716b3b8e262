# What only the owner of the board knows. Every value here is to be edited.
{
  orin = {
    host = {
      # The content of ~/.ssh/id_ed25519.pub.
      sshKeys = [ "ssh-ed25519 replace-me" ];
      # As `mkfs.ext4 -L nixos` and `mkfs.fat -F 32 -n ESP` named them.
      disk = {
        root = "nixos";
        boot = "ESP";
      };
    };
  };
}
