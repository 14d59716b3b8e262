# A whole machine around the other modules: boot, disks, users, ssh, caches.
{
  config,
  lib,
  pkgs,
  ...
}:
let
  cfg = config.orin.host;
  # What nixos/hosts/site.nix holds until its owner has edited it.
  placeholder = "replace-me";
  label = name: "/dev/disk/by-label/${name}";
  common = import ../common { inherit lib config; };
  inherit (common) check option paths;
  inherit (common) switch words;
  inherit (check) matches rule;
  kinds = "(sk-)?(ssh-ed25519|ssh-rsa|ecdsa-sha2-nistp[0-9]+)(@openssh.com)?";
  # A file that was read may have several, and ends with a line's end.
  given = lib.filter (key: key != "") (lib.concatMap (lib.splitString "\n") cfg.sshKeys);
  private = lib.any (lib.hasInfix "PRIVATE KEY") given;
  # One message is enough then, without the key.
  keys = lib.optionals (!private) given;
  sshKeys = import ./ssh-keys.nix;
  edited = key: !lib.hasInfix placeholder key;
  labels = lib.filterAttrs (_: name: name != null) cfg.disk;
  # Characters that a file system's label may have, and systemd need not escape; FAT has eleven.
  longest = {
    root = 16;
    boot = 11;
    swap = 15;
  };
  mountPoints = {
    root = "/";
    boot = "/boot";
  };
  hasPassword = lib.any (name: (config.users.users.${cfg.user}.${name} or null) != null) (
    words "hashedPassword hashedPasswordFile initialHashedPassword initialPassword password"
  );
  labelled = option (lib.types.nullOr lib.types.str) null;
in
{
  imports = [
    ../tinygrad.nix
    (lib.mkRemovedOptionModule [
      "orin"
      "llm-gateway"
    ] "templates/fleet/gateway.nix has its settings of LiteLLM.")
  ];

  options.orin.host = {
    enable = lib.mkEnableOption "the machine behind `nixosConfigurations.orin`";

    user =
      option lib.types.str "orin" "alice"
        "The user that logs in, becomes root with sudo, asked for a password if `users.users` has one, and may use the GPU.";

    sshKeys =
      option (lib.types.listOf lib.types.str) [ ] [ "ssh-ed25519 AAAAC3Nza... alice@laptop" ]
        "Public keys that log in as `orin.host.user` and as root. There are no passwords.";

    disk = {
      root = labelled "nixos" "The label of the root file system, ext4, as `mkfs.ext4 -L nixos` writes it.";
      boot = labelled "ESP" "The label of the EFI system partition, as `mkfs.fat -F 32 -n ESP` writes it.";
      swap = labelled "swap" "The label of a swap partition, if there is one, as `mkswap -L swap` writes it.";
    };

    mdns = switch true "Whether the board answers to its name in the local network: `ssh orin@orin-1.local`.";

    rescueLogin = switch false ''
      Whether the serial console (micro-USB or the debug header, 115200 baud) is root's without a
      password, in rescue and emergency mode too. false: it has nobody to log in as, so that who
      holds the board has no shell.
    '';

    caches = lib.mkOption {
      type = lib.types.attrsOf lib.types.str;
      default = {
        "https://cache.nixos-cuda.org" =
          "cache.nixos-cuda.org:74DUi4Ye579gUqzH4ziL9IyiJBlDpMRn9MBN8oNan9M=";
      };
      defaultText = lib.literalMD "the community's cache of CUDA packages";
      example = {
        "https://cache.example.org" = "cache.example.org-1:AAAA...=";
      };
      description = ''
        Binary caches beside cache.nixos.org, and the public key of each. What is built for CUDA 12.6
        and sm_87 is in none of the public ones: name a cache of your own to build it once.
      '';
    };

    modelFolder =
      option lib.types.path "/var/lib/models" "/mnt/nvme/models"
        "A folder for GGUF files, writable by `orin.host.user`, readable by all.";
  };

  config = lib.mkIf cfg.enable {
    assertions = [
      (check.demand (!private) ''
        orin.host.sshKeys holds a private key, which would lie in the Nix store for everyone to
        read. Write the content of ~/.ssh/id_ed25519.pub, and make a new pair if this was built.'')
      (check.demand (given != [ ]) ''
        orin.host.sshKeys is empty, and nobody could log in. Set it to the content of
        your ~/.ssh/id_ed25519.pub, as in `orin.host.sshKeys = [ "ssh-ed25519 AAAA... me" ]`.'')
    ]
    ++ lib.mapAttrsToList (
      name: mountPoint:
      check.demand (config.fileSystems.${mountPoint}.device != label "") ''
        orin.host.disk.${name} is not set. `lsblk -o NAME,LABEL` on the board shows the
        labels; set it as in `orin.host.disk.${name} = "${if name == "root" then "nixos" else "ESP"}"`.''
    ) mountPoints
    ++ lib.concatMap (
      key:
      let
        words = lib.splitString " " key;
        kind = lib.head words;
        body = lib.concatStrings (lib.take 1 (lib.tail words));
        lined = matches "${kinds} [A-Za-z0-9+/=-]+( .*)?" key;
        wants = rule "orin.host.sshKeys" key;
      in
      [
        (wants lined ''write the content of ~/.ssh/id_ed25519.pub, not its path: "ssh-ed25519 AAAA... me"'')
        (wants (!lined || !edited key || sshKeys.isWhole kind body)
          "it is cut, or of another kind than its first word says: copy the whole line of ~/.ssh/id_ed25519.pub"
        )
      ]
    ) keys
    ++ [
      (rule "orin.host.user" cfg.user (
        !(config.users.users.${cfg.user}.isSystemUser or false)
      ) ''this is the user of a service of this host; name one of your own, as in "orin"'')
      (rule "orin.host.disk.swap" cfg.disk.swap (
        cfg.disk.swap == null || cfg.disk.swap != cfg.disk.root
      ) ''two file systems would have this label; give each its own, as in "swap"'')
      (rule "orin.host.user" cfg.user (
        cfg.user != "root"
      ) ''root logs in with the same keys already; name a user of your own, as in "orin"'')
      (rule "orin.host.user" cfg.user (matches "[a-z_][a-z0-9_-]{0,30}" cfg.user)
        ''systemd takes lower-case letters, digits, _ and -, 31 at most, no digit first, as in "orin"''
      )
      (rule "orin.host.disk.boot" cfg.disk.boot (
        cfg.disk.boot == null || cfg.disk.boot != cfg.disk.root && cfg.disk.boot != cfg.disk.swap
      ) ''two file systems would have this label; give each its own, as in "ESP"'')
      (rule "orin.host.modelFolder" (toString cfg.modelFolder) (
        !lib.hasPrefix builtins.storeDir (toString cfg.modelFolder)
      ) ''the Nix store is read-only; name a folder of the board as a string, as in "/var/lib/models"'')
      (rule "orin.host.modelFolder" (toString cfg.modelFolder) (
        !lib.elem (toString cfg.modelFolder) (paths.homes config)
      ) "everyone may read this folder, and it is somebody's home; write one of its own")
      # It becomes the user's own.
      (rule "orin.host.modelFolder" (toString cfg.modelFolder)
        (paths.inStore cfg.modelFolder || paths.ownable cfg.modelFolder)
        ''the folder is given to ${cfg.user}; write one of its own and no system's, without a space, as in "/var/lib/models"''
      )
    ]
    ++ lib.mapAttrsToList (
      name: given:
      rule "orin.host.disk.${name}" given
        (matches "[A-Za-z0-9_.-]+" given && lib.stringLength given <= longest.${name})
        "write the label alone, no path, of letters, digits, _ . and -, ${toString longest.${name}} at most"
    ) labels
    ++ lib.concatLists (
      lib.mapAttrsToList (address: key: [
        (rule "orin.host.caches.${check.show address}" key
          (matches "(https?|ssh|s3|file)://[^[:space:]]+" address)
          ''write where the cache is with its scheme, as in "https://cache.example.org"''
        )
        (check.noPassword "orin.host.caches" address "set `nix.settings.netrc-file`")
        (rule "orin.host.caches.${check.show address}" key (matches "[^:[:space:]]+:[A-Za-z0-9+/]{43}=" key)
          "write name:key of the public key, as `nix key convert-secret-to-public` prints it"
        )
      ]) cfg.caches
    );

    # The configuration evaluates as it is in the repository, so that it can be checked; it must not
    # become a running system with a key that nobody has.
    system.checks = [ (sshKeys.checked pkgs (lib.filter edited keys)) ];
    system.preSwitchChecks.orinHost = lib.mkIf (lib.any (lib.hasInfix placeholder) cfg.sshKeys) ''
      echo "orin.host.sshKeys still holds the ${placeholder} of nixos/hosts/site.nix: nobody could log in."
      echo "Put the content of your ~/.ssh/id_ed25519.pub there."
      exit 1
    '';

    # Defaults where another module may have its own: this one fits into a configuration that exists.
    boot.loader = {
      systemd-boot = {
        enable = lib.mkDefault true;
        # Each generation's kernel and initrd are copied to the EFI partition.
        configurationLimit = lib.mkDefault 10;
      };
      efi.canTouchEfiVariables = lib.mkDefault true;
    };

    fileSystems = {
      "/" = {
        device = lib.mkDefault (label (toString cfg.disk.root));
        fsType = lib.mkDefault "ext4";
        # Not a default: NixOS has a list of its own for this, and lists of equal weight are joined.
        options = lib.optional (cfg.disk.root != null) "noatime";
      };
      "/boot" = {
        device = lib.mkDefault (label (toString cfg.disk.boot));
        fsType = lib.mkDefault "vfat";
        options = lib.mkDefault [ "umask=0077" ];
      };
    };
    swapDevices = lib.optional (cfg.disk.swap != null) { device = label cfg.disk.swap; };

    services.avahi = lib.mkIf cfg.mdns {
      enable = lib.mkDefault true;
      nssmdns4 = lib.mkDefault true;
      publish.enable = lib.mkDefault true;
      publish.addresses = lib.mkDefault true;
    };

    # JetPack's console: "Tegra Combined UART".
    systemd.services."serial-getty@ttyTCU0" = lib.mkIf cfg.rescueLogin {
      overrideStrategy = "asDropin";
      serviceConfig.ExecStart = [
        ""
        "${lib.getExe' pkgs.util-linux "agetty"} --autologin root --keep-baud 115200 %I $TERM"
      ];
    };
    systemd.services.emergency.environment.SYSTEMD_SULOGIN_FORCE = lib.mkIf cfg.rescueLogin "1";
    systemd.services.rescue.environment.SYSTEMD_SULOGIN_FORCE = lib.mkIf cfg.rescueLogin "1";

    users.users = lib.mkMerge [
      {
        root.openssh.authorizedKeys.keys = keys;
      }
      (lib.mkIf (cfg.user != "root") {
        ${cfg.user} = {
          isNormalUser = lib.mkDefault true;
          extraGroups = [ "wheel" ];
          openssh.authorizedKeys.keys = keys;
        };
      })
    ];
    orin.tinygrad.users = [ cfg.user ];
    # There is no password to ask this one for; others of the group `wheel` are asked for theirs.
    security.sudo.extraRules = lib.optionals (!hasPassword) [
      {
        users = [ cfg.user ];
        commands = [
          {
            command = "ALL";
            options = [ "NOPASSWD" ];
          }
        ];
      }
    ];

    services.openssh = {
      enable = lib.mkDefault true;
      settings = {
        PasswordAuthentication = lib.mkDefault false;
        KbdInteractiveAuthentication = lib.mkDefault false;
        PermitRootLogin = lib.mkDefault "prohibit-password";
      };
    };
    networking.firewall.enable = lib.mkDefault true;
    # Either has the Wi-Fi that the installer was told of: /etc/NetworkManager/system-connections, or
    # /etc/wpa_supplicant/imperative.conf beside systemd-networkd.
    networking.networkmanager.enable = lib.mkDefault (!config.networking.useNetworkd);
    networking.wireless =
      lib.mkIf
        (
          config.networking.useNetworkd
          && !config.networking.networkmanager.enable
          && !config.networking.wireless.iwd.enable
        )
        {
          enable = lib.mkDefault true;
          allowAuxiliaryImperativeNetworks = lib.mkDefault true;
        };
    # A sixth of the time that an evaluation takes, on the board too.
    documentation.nixos.enable = lib.mkDefault false;
    services.timesyncd.enable = lib.mkDefault (!config.services.chrony.enable);

    nix = {
      settings = {
        experimental-features = [
          "nix-command"
          "flakes"
        ];
        substituters = lib.attrNames cfg.caches;
        trusted-public-keys = lib.attrValues cfg.caches;
        # One who is trusted becomes root without a password.
        trusted-users = lib.optional (!hasPassword) cfg.user;
      };
      gc = {
        automatic = lib.mkDefault true;
        dates = lib.mkDefault "weekly";
        options = lib.mkDefault "--delete-older-than 30d";
      };
      optimise.automatic = lib.mkDefault true;
    };

    # Modules of 8 GB build their kernels, too.
    zramSwap.enable = lib.mkDefault (
      lib.elem (config.hardware.nvidia-jetpack.som or null) [
        "orin-nano"
        "orin-nx"
      ]
    );

    systemd.tmpfiles.rules = [ "d ${toString cfg.modelFolder} 0755 ${cfg.user} users -" ];

    environment.systemPackages = [
      pkgs.curl
      pkgs.git
      pkgs.htop
    ];

    system.stateVersion = lib.mkDefault "26.05";
  };
}
