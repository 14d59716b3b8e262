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

  ours = lib.attrValues (removeAttrs self.nixosModules [ "default" ]);
  # One nixpkgs for all hosts that need no JetPack.
  machine =
    system: modules:
    lib.nixosSystem {
      modules =
        ours
        ++ [
          {
            nixpkgs.pkgs = self.legacyPackages.${system};
            networking.hostName = "board";
          }
        ]
        ++ modules;
    };

  # Values of options: any machine shows them.
  imitation =
    module:
    machine "x86_64-linux" [
      right
      { orin.board.check = false; }
      module
    ];
  # Someone's own machine with our modules, and nothing of JetPack.
  bare =
    system: module:
    machine system [
      {
        system.stateVersion = "26.05";
        fileSystems."/" = {
          device = "none";
          fsType = "tmpfs";
        };
        boot.loader.grub.enable = false;
        orin.tinygrad.enable = true;
      }
      module
    ];
  # The same with the options of JetPack that ours look at, and no kernel to evaluate.
  jetpackOptions = {
    options.hardware.nvidia-jetpack = lib.mapAttrs (_: default: lib.mkOption { inherit default; }) {
      enable = true;
      majorVersion = "6";
      som = "orin-agx";
      maxClock = false;
    };
  };
  # The real thing.
  board =
    module:
    self.lib.mkOrin {
      hostName = "board";
      modules = [
        right
        module
      ];
    };

  cases = {
    missing = {
      host = imitation {
        orin = {
          host.sshKeys = lib.mkForce [ ];
          host.disk.root = lib.mkForce null;
          llm-server.models = lib.mkForce { };
          telemetry.grafana.secretKeyFile = lib.mkForce null;
        };
      };
      wanted = [
        "orin.host.sshKeys is empty"
        "orin.host.disk.root is not set"
        "orin.llm-server.models is empty"
        "orin.telemetry.grafana.secretKeyFile is not set"
      ];
    };
    forAllToSee = {
      host = imitation {
        orin.llm-server = {
          models.main.file = lib.mkForce ./assertions.nix;
          openFirewall = true;
        };
        orin.telemetry = {
          exporter.openFirewall = true;
          grafana.secretKeyFile = lib.mkForce ./assertions.nix;
          grafana.listenAddress = "0.0.0.0";
          prometheus.remoteWrite = [
            {
              url = "https://metrics.example.org/api/v1/write";
              basic_auth.username = "orin";
              basic_auth.password = "hunter2";
            }
          ];
        };
      };
      wanted = [
        "orin.llm-server.models.main.file is in the Nix store"
        "orin.telemetry.grafana.secretKeyFile is in the Nix store"
        "remoteWrite holds a password"
        "the server listens on 127.0.0.1 only"
        "the exporter listens on"
        ''Grafana listens on 0.0.0.0 with the password "admin"''
      ];
    };
    engine = {
      host = imitation {
        orin.llm-server.models.main.file = lib.mkForce "models/model.gguf";
        orin.telemetry.grafana.openFirewall = true;
        orin.telemetry.prometheus.remoteWrite = [
          {
            url = "https://metrics.example.org/api/v1/write";
            sigv4.secret_key = "hunter2";
          }
        ];
      };
      wanted = [
        "is no absolute path"
        "orin.telemetry.grafana.openFirewall is true, but Grafana listens on 127.0.0.1 only"
        "remoteWrite holds a password"
      ];
    };

    jetpack5 = {
      host = bare "aarch64-linux" {
        imports = [ jetpackOptions ];
        hardware.nvidia-jetpack.majorVersion = "5";
      };
      wanted = [ ''hardware.nvidia-jetpack.majorVersion is "5" (Jetson Linux r35)'' ];
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
      host = board {
        hardware.nvidia-jetpack.configureCuda = false;
        nixpkgs.config.cudaSupport = true;
        nixpkgs.config.cudaCapabilities = [ "7.2" ];
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
lib.mapAttrs (_: case: {
  inherit (case) wanted;
  got = map (rule: rule.message) (lib.filter (rule: !rule.assertion) case.host.config.assertions);
}) cases
