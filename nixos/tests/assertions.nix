# Wrong use, and what it says. A case changes a host that is right; the texts in `wanted` are all that
# its failing assertions may say, one each.
#
# Strings only, nothing is built: { name = { wanted = [ text ]; got = [ message ]; }; }.
{ self }:
let
  inherit (self.inputs.nixpkgs) lib;

  right = {
    imports = [ ../hosts/site.nix ];
    orin = {
      host.enable = true;
      tinygrad.enable = true;
      performance.enable = true;
      telemetry.enable = true;
      llm-server = {
        enable = true;
        models.main.file = "/var/lib/models/model.gguf";
      };
    };
  };

  # What a machine has to be: our modules, without the thousand of NixOS that have no say in it. Each of
  # those takes half a second.
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
      config.orin.board.check = false;
    };
  # The board alone.
  bare = system: module: boardWith self.legacyPackages.${system} module;
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

  boards = {
    # A power mode of another module, and one of the right module.
    nanoInMaxn = {
      host = bare "aarch64-linux" {
        imports = [ jetpackOptions ];
        orin.board.check = false;
        hardware.nvidia-jetpack.som = "orin-nano";
        orin.performance.enable = true;
        orin.performance.powerMode = "MAXN";
      };
      wanted = [ ''orin.performance.powerMode = "MAXN": no orin-nano has it; write one of 7W'' ];
    };
    nxSuper = {
      host = bare "aarch64-linux" {
        imports = [ jetpackOptions ];
        orin.board.check = false;
        hardware.nvidia-jetpack.som = "orin-nx";
        hardware.nvidia-jetpack.super = true;
        orin.performance.enable = true;
      };
      wanted = [ ];
    };
    xavier = {
      host = bare "aarch64-linux" {
        imports = [ jetpackOptions ];
        hardware.nvidia-jetpack.som = "xavier-agx";
        hardware.nvidia-jetpack.majorVersion = "5";
      };
      wanted = [ ''hardware.nvidia-jetpack.som is "xavier-agx", whose GPU is sm_72'' ];
    };
    noOverlay = {
      host = lib.nixosSystem {
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
      wanted = [ "this nixpkgs has no tinygrad-orin" ];
    };

    jetpack5 = {
      host = bare "aarch64-linux" {
        imports = [ jetpackOptions ];
        hardware.nvidia-jetpack.majorVersion = "5";
      };
      wanted = [ ''hardware.nvidia-jetpack.majorVersion is "5" (Jetson Linux r35)'' ];
    };
    jetpack7 = {
      host = bare "aarch64-linux" {
        imports = [ jetpackOptions ];
        hardware.nvidia-jetpack.majorVersion = "7";
      };
      wanted = [ ''hardware.nvidia-jetpack.majorVersion is "7" (Jetson Linux r39, CUDA 13)'' ];
    };
    genericModule = {
      host = bare "aarch64-linux" {
        imports = [ jetpackOptions ];
        hardware.nvidia-jetpack.som = "generic";
      };
      wanted = [ ''hardware.nvidia-jetpack.som is "generic"'' ];
    };
    noGraphics = {
      host = bare "aarch64-linux" jetpackOptions;
      wanted = [ "hardware.graphics.enable is false" ];
    };
    otherCapability = {
      host =
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
      wanted = [ "nixpkgs.config.cudaCapabilities is [ 7.2 ], an Orin is 8.7" ];
    };
    otherSystem = {
      host = bare "x86_64-linux" { };
      wanted = [ "the system is x86_64-linux, a Jetson Orin is aarch64-linux" ];
    };
    noJetpack = {
      host = bare "aarch64-linux" { };
      wanted = [ "JetPack is not enabled" ];
    };
  };
in
lib.mapAttrs
  (_: case: {
    inherit (case) wanted;
    got = map (rule: rule.message) (lib.filter (rule: !rule.assertion) case.host.config.assertions);
  })
  (
    import ./mistakes.nix { inherit lib imitation; }
    // import ./slips.nix { inherit lib imitation; }
    // boards
  )
