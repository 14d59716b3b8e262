# Wrong use, and what it says: by the name of a host that was right and has been changed, the messages of its
# failing assertions. Strings only, nothing is built.
{ self }:
let
  inherit (self.inputs.nixpkgs) lib;

  # Values that a case replaces, lists too.
  right = lib.mapAttrsRecursive (_: lib.mkDefault) (
    lib.recursiveUpdate (import ../hosts/site.nix) {
      orin.host.enable = true;
      orin.tinygrad.enable = true;
      orin.performance.enable = true;
      orin.telemetry.enable = true;
      orin.llm-server.enable = true;
      orin.llm-server.models.main.file = "/var/lib/models/model.gguf";
    }
  );

  # What a machine has to be: our modules. With the thousand of NixOS each would take half a second.
  bareWith =
    pkgs: module:
    lib.evalModules {
      modules = [
        {
          options = {
            assertions = lib.mkOption { };
            hardware.graphics.enable = lib.mkOption { default = false; };
            environment.etc = lib.mkOption { default = { }; };
          };
          config = {
            _module.args = { inherit pkgs; };
            _module.freeformType = lib.types.lazyAttrsOf lib.types.anything;
            networking.hostName = "board";
          };
        }
        module
      ];
    };
  # A host with all of ours, and what they read of NixOS' own options.
  imitation =
    module:
    bareWith self.legacyPackages.x86_64-linux {
      imports = lib.attrValues (removeAttrs self.nixosModules [ "default" ]) ++ [
        right
        module
      ];
      options.services = lib.mapAttrsRecursive (_: default: lib.mkOption { inherit default; }) {
        openssh.enable = true;
        openssh.ports = [ 22 ];
        grafana.enable = false;
        grafana.dataDir = "/var/lib/grafana";
        harmonia.cache = { };
        prometheus = {
          port = 9090;
          exporters.node.port = 9100;
          remoteWrite = [ ];
          scrapeConfigs = [ ];
        };
      };
      options.users.users = lib.mkOption {
        type = lib.types.attrsOf (
          lib.types.submodule {
            freeformType = lib.types.lazyAttrsOf lib.types.anything;
            options.home = lib.mkOption { default = "/home/somebody"; };
          }
        );
      };
      options.networking =
        lib.mapAttrsRecursive (_: default: lib.mkOption { inherit default; }) {
          useNetworkd = false;
          networkmanager.enable = false;
          wireless.iwd.enable = false;
        }
        // {
          firewall.allowedTCPPorts = lib.mkOption { type = lib.types.listOf lib.types.port; };
        };
      config.orin.board.check = false;
    };
  bare = system: boardWith self.legacyPackages.${system};
  boardWith =
    pkgs: module:
    bareWith pkgs {
      imports = [
        self.nixosModules.tinygrad
        self.nixosModules.performance
        module
      ];
      orin.tinygrad.enable = true;
    };
  # The same with the options of JetPack that ours look at, and no kernel to evaluate.
  jetpackOptions = {
    options.hardware.nvidia-jetpack = lib.mapAttrs (_: default: lib.mkOption { inherit default; }) {
      enable = true;
      majorVersion = "6";
      som = "orin-agx";
      maxClock = false;
      super = false;
    };
    options.services.nvpmodel.enable = lib.mkOption { default = false; };
  };

  jetson =
    module:
    bare "aarch64-linux" {
      imports = [
        jetpackOptions
        module
      ];
    };

  mistakes = lib.mapAttrs (_: imitation) (lib.importTOML ./mistakes.toml);

  boards = {
    missing = imitation {
      orin.host.sshKeys = [ ];
      orin.host.disk.root = null;
      orin.llm-server.models = lib.mkForce { };
    };
    # A power mode of another module; nothing is wrong with the second.
    nanoInMaxn = jetson {
      orin.board.check = false;
      hardware.nvidia-jetpack.som = "orin-nano";
      orin.performance.enable = true;
      orin.performance.powerMode = "MAXN";
    };
    nxSuper = jetson {
      orin.board.check = false;
      hardware.nvidia-jetpack.som = "orin-nx";
      hardware.nvidia-jetpack.super = true;
      orin.performance.enable = true;
    };
    xavier = jetson {
      hardware.nvidia-jetpack.som = "xavier-agx";
      hardware.nvidia-jetpack.majorVersion = "5";
    };
    noOverlay = lib.nixosSystem {
      modules = [
        self.nixosModules.telemetry
        {
          nixpkgs.pkgs = self.inputs.nixpkgs.legacyPackages.x86_64-linux;
          networking.hostName = "board";
          system.stateVersion = "26.05";
          fileSystems."/" = {
            device = "none";
            fsType = "tmpfs";
          };
          boot.loader.grub.enable = false;
          orin.telemetry.enable = true;
        }
      ];
    };

    jetpack5 = jetson {
      hardware.nvidia-jetpack.majorVersion = "5";
    };
    genericModule = jetson {
      hardware.nvidia-jetpack.som = "generic";
    };
    noGraphics = jetson { };
    otherCapability =
      boardWith
        (
          self.legacyPackages.aarch64-linux
          // {
            config = {
              cudaSupport = true;
              cudaCapabilities = [ "7.2" ];
            };
          }
        )
        {
          imports = [ jetpackOptions ];
          hardware.graphics.enable = true;
        };
    otherSystem = bare "x86_64-linux" { };
    noJetpack = bare "aarch64-linux" { };
  };
in
lib.mapAttrs (
  _: host: map (rule: rule.message) (lib.filter (rule: !rule.assertion) host.config.assertions)
) (mistakes // boards)
