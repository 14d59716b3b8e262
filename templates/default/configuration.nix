# Every option: `nix build PATH_OR_URL_OF_TINYGRAD_ORIN#options` writes a page of them.
{
  orin = {
    host = {
      enable = true;
      # The content of ~/.ssh/id_ed25519.pub.
      sshKeys = [ "ssh-ed25519 replace-me" ];
      # As `mkfs.ext4 -L nixos` and `mkfs.fat -F 32 -n ESP` named them.
      disk.root = "nixos";
      disk.boot = "ESP";
    };

    tinygrad.enable = true;

    performance = {
      enable = true;
      powerMode = "MAXN";
    };

    telemetry.enable = true;

    llm-server = {
      enable = true;
      # Copy a GGUF there: scp model.gguf orin@my-orin:/var/lib/models/
      models.main.file = "/var/lib/models/model.gguf";
    };
  };
}
