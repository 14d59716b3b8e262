# A USB stick that installs one host of a flake: it carries the flake and all inputs of its lock, answers
# as orin-installer.local to the host's ssh keys, and asks once.
{
  self,
  nixpkgs,
  jetpack-nixos,
  disko,
}:
{
  # The flake that has the host, as its own outputs know it: `self`.
  flake,
  # Its name among the flake's nixosConfigurations.
  host,
  # The machine that builds the image; the kernel is compiled there.
  system ? "aarch64-linux",
}:
let
  inherit (nixpkgs) lib;
  inherit (flake.nixosConfigurations.${host}) config;
  inherit (config.orin.host) disk sshKeys user;
  layouts = import ./layout.nix { inherit lib disko; };
  placeholder = lib.any (lib.hasInfix "replace-me") sshKeys;

  # Every flake that the lock names: the installer evaluates without GitHub.
  sources =
    let
      inputsOf = input: lib.attrValues (input.inputs or { });
      walk =
        found: input:
        if lib.elem input.outPath found then
          found
        else
          lib.foldl walk (found ++ [ input.outPath ]) (inputsOf input);
    in
    walk [ ] flake;

  module =
    { pkgs, ... }:
    let
      scripts = layouts.scripts pkgs disk;
      diskOf = name: {
        inherit name;
        device = layouts.devices.${name};
        script = lib.getExe scripts.${name};
      };
      program = pkgs.writeShellApplication {
        name = "orin-install";
        runtimeInputs = [
          pkgs.bash
          pkgs.dosfstools
          pkgs.e2fsprogs
          pkgs.gawk
          pkgs.gnused
          pkgs.gptfdisk
          pkgs.jq
          pkgs.nixos-install
          pkgs.parted
          pkgs.python3
          pkgs.util-linux
        ];
        runtimeEnv.ORIN_INSTALL = builtins.toJSON {
          inherit host user;
          name = config.networking.hostName;
          flake = "${flake}";
          labels = lib.filter (label: label != null) (lib.attrValues disk);
          disks = map diskOf layouts.order;
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
          "touch $out"
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
      hardware.nvidia-jetpack.enable = true;
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
        extra-trusted-public-keys = lib.attrValues config.orin.host.caches;
      };
      isoImage.storeContents = sources;
      image.baseName = lib.mkForce "orin-installer";
      environment.etc."orin-install/checked".source = checked;
      environment.systemPackages = [ program ];
      # The first login on each console (screen, serial at 115200 baud) is the installer.
      programs.bash.loginShellInit = ''
        if [ -z "$SSH_CONNECTION" ] && mkdir "/tmp/asked$(tty | tr / -)" 2>/dev/null; then
          sudo orin-install || echo "Again: sudo orin-install"
        fi
      '';
      system.stateVersion = lib.trivial.release;
    };
in
lib.nixosSystem { modules = [ module ]; }
