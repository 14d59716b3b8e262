# A USB stick that installs one host of a flake: it carries the flake and all inputs of its lock, answers
# as orin-installer.local to the host's ssh keys, and asks once.
{
  nixpkgs,
  jetpack-nixos,
  # As lib.nix has them.
  layout,
  sources,
}:
{
  # The flake that has the host, as its own outputs know it: `self`.
  flake,
  # Its name among the flake's nixosConfigurations.
  host,
  # The machine that builds the image. An aarch64 one, or one that emulates it, builds the host too.
  system ? "aarch64-linux",
  # Whether the stick has the host's system on it: then the board builds nothing and needs no network.
  # What is cross-compiled is another derivation than what the board would build.
  carry ? system == "aarch64-linux",
}:
let
  inherit (nixpkgs) lib;
  inherit (flake.nixosConfigurations.${host}) config;
  inherit (config.orin.host) disk sshKeys user;
  placeholder = lib.any (lib.hasInfix "replace-me") sshKeys;
  keys = lib.filter (key: key != "") (lib.concatMap (lib.splitString "\n") sshKeys);

  module =
    { pkgs, ... }:
    let
      program = pkgs.writeShellApplication {
        name = "orin-install";
        runtimeInputs = [
          pkgs.bash
          pkgs.dosfstools
          pkgs.e2fsprogs
          pkgs.gawk
          pkgs.gnused
          pkgs.gptfdisk
          pkgs.iproute2
          pkgs.jq
          pkgs.nixos-install
          pkgs.parted
          pkgs.python3
          pkgs.util-linux
          pkgs.wpa_supplicant
        ];
        runtimeEnv.ORIN_INSTALL = builtins.toJSON {
          inherit host user;
          name = config.networking.hostName;
          flake = "${flake}";
          supplicant =
            config.networking.wireless.allowAuxiliaryImperativeNetworks
            && !config.networking.networkmanager.enable;
          labels = lib.filter (label: label != null) (lib.attrValues disk);
          script = lib.getExe (layout.script pkgs disk);
          system = if carry then "${config.system.build.toplevel}" else null;
        };
        text = ''exec python3 ${./install.py} "$@"'';
      };
      # The image is not built around a key that nobody has.
      checked = pkgs.buildPackages.runCommand "orin-host-is-edited" { } (
        if placeholder then
          ''
            echo "host ${host}: orin.host.sshKeys still holds replace-me: nobody could log in." >&2
            echo "Put the content of your ~/.ssh/id_ed25519.pub there, then build the installer." >&2
            exit 1
          ''
        else
          "ln -s ${(import ../modules/host/ssh-keys.nix).checked pkgs keys} $out"
      );
    in
    {
      imports = [
        "${nixpkgs}/nixos/modules/installer/cd-dvd/installation-cd-minimal.nix"
        jetpack-nixos.nixosModules.default
      ];

      nixpkgs.hostPlatform = "aarch64-linux";
      nixpkgs.buildPlatform = system;
      nixpkgs.config.allowUnfree = true;
      # The host's own JetPack: its kernel is built once for both.
      hardware.nvidia-jetpack = lib.genAttrs [ "enable" "majorVersion" "som" "carrierBoard" "super" ] (
        name: config.hardware.nvidia-jetpack.${name}
      );
      # An NX or Nano that builds its host here has no other swap.
      zramSwap.enable = true;
      # JetPack's kernel lacks modules that an image for every machine has.
      hardware.enableAllHardware = lib.mkForce false;
      # A kernel module to compile, for disks that the installer does not make.
      boot.supportedFilesystems.zfs = lib.mkForce false;

      networking.hostName = "orin-installer";
      services.avahi = {
        enable = true;
        publish.enable = true;
        publish.addresses = true;
      };
      users.users.root.openssh.authorizedKeys.keys = sshKeys;
      services.openssh.settings.PasswordAuthentication = false;

      nix.settings = {
        experimental-features = [
          "nix-command"
          "flakes"
        ];
        extra-substituters = lib.attrNames config.orin.host.caches;
        # What the store calls valid is on the disk: a power cut leaves no empty file behind.
        fsync-store-paths = true;
        extra-trusted-public-keys = lib.attrValues config.orin.host.caches;
      };
      isoImage.storeContents = sources flake ++ lib.optional carry config.system.build.toplevel;
      # Wi-Fi: nmtui; the installed host keeps what was set up.
      networking.networkmanager.enable = true;
      networking.wireless.enable = lib.mkForce false;
      image.baseName = lib.mkForce "orin-installer";
      environment.etc."orin-install/checked".source = checked;
      environment.systemPackages = [ program ];
      # What happens to the terminal, or to ssh, is nothing to it.
      systemd.services.orin-installation = {
        description = "Install ${host} on this board";
        # nixos-install and nmcli, as a login has them.
        path = [ "/run/current-system/sw" ];
        serviceConfig.Type = "oneshot";
        serviceConfig.RemainAfterExit = true;
        serviceConfig.ExecStart = "${lib.getExe program} @/run/orin-installation";
      };
      # The first login on the serial console (115200 baud) is the installer; an Orin shows no console on a screen.
      programs.bash.loginShellInit = ''
        if [ -z "$SSH_CONNECTION" ] && mkdir "/tmp/asked$(tty | tr / -)" 2>/dev/null; then
          sudo orin-install || echo "Again, or to go on: sudo orin-install"
        fi
      '';
      system.stateVersion = lib.trivial.release;
    };
in
lib.nixosSystem { modules = [ module ]; }
