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
      config.orin.board.check = false;
    };
  # The board alone.
  bare =
    system: module:
    boardWith self.legacyPackages.${system} module;
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

  cases = {
    missing = {
      host = imitation {
        orin = {
          host.sshKeys = lib.mkForce [ ];
          host.disk.root = lib.mkForce null;
          llm-server.models = lib.mkForce { };
        };
      };
      wanted = [
        "orin.host.sshKeys is empty"
        "orin.host.disk.root is not set"
        "orin.llm-server.models is empty"
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
      ];
    };
    engine = {
      host = imitation {
        orin.llm-server = {
          models.main.file = lib.mkForce "models/model.gguf";
          insecure = true;
          apiKeyFile = "/var/lib/secrets/llm-keys";
          metrics = false;
        };
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
        "orin.llm-server.insecure is true, and apiKeyFile"
        "orin.telemetry.grafana.openFirewall is true, but Grafana listens on 127.0.0.1 only"
        "remoteWrite holds a password"
      ];
    };

    # Values of options, as many as one host can have wrong at once.
    values = {
      host = imitation {
        orin.host = {
          user = lib.mkForce "Bob.Smith";
          sshKeys = lib.mkForce [ "~/.ssh/id_ed25519.pub" ];
          disk.root = lib.mkForce "/dev/disk/by-label/nixos";
          disk.boot = lib.mkForce "EFI-PARTITION";
          modelFolder = "${./.}";
          caches."cache.example.org" = "AAAA";
        };
        orin.tinygrad = {
          device = "cuda";
          environment."DEBUG=2" = "";
          users = [ "carol" ];
        };
        orin.performance = {
          powerMode = "maxn";
          cpuGovernor = "fast";
        };
        orin.telemetry = {
          exporter = {
            listenAddress = "127.0.0.1:9401";
            port = 80;
            webFiles."tls.key" = "/var/lib/secrets/tls.key";
          };
          grafana = {
            listenAddress = "*";
            port = 443;
            secretKeyFile = "secrets/key";
            adminPasswordFile = "secrets/key";
          };
          prometheus = {
            retention = "30 days";
            scrapeInterval = "five seconds";
            remoteWrite = [ { url = "metrics.example.org"; } ];
            extraScrapeConfigs = [ { job_name = "node"; } ];
          };
        };
        orin.llm-server = {
          host = "0.0.0.0:8000";
          apiKeyFile = "~/keys";
          environment."A-B" = "1";
          models = {
            main = {
              file = lib.mkForce "/var/lib/models/My Model.gguf";
              memory = "40 %";
              port = 9090;
            };
            folder = {
              file = "/var/lib/models/";
              port = 22;
              extraFlags = [ "--port=9000" ];
            };
            "Big Model" = {
              file = "https://example.org/model.gguf";
              port = 8005;
            };
          };
        };
        orin.llm-gateway = {
          enable = true;
          host = "0.0.0.0";
          servers.orin-1 = {
            url = "orin-1:8000";
            models = [ "main" ];
          };
        };
      };
      wanted = [
        ''orin.host.user = "Bob.Smith": systemd takes lower-case letters''
        ''orin.host.sshKeys = "~/.ssh/id_ed25519.pub": write the content''
        ''orin.host.disk.root = "/dev/disk/by-label/nixos": write the label alone''
        ''orin.host.disk.boot = "EFI-PARTITION": write the label alone''
        "the Nix store is read-only"
        ''orin.host.caches."cache.example.org" = "AAAA": write where the cache is''
        ''orin.host.caches."cache.example.org" = "AAAA": write name:key''
        ''orin.tinygrad.device = "cuda": tinygrad has none of this name''
        "orin.tinygrad.environment.\"DEBUG=2\""
        ''orin.tinygrad.users = "carol": there is no such user''
        ''orin.performance.powerMode = "maxn": no generic has it''
        ''orin.performance.cpuGovernor = "fast": Linux has none''
        ''orin.telemetry.exporter.listenAddress = "127.0.0.1:9401": write an address alone''
        "orin.telemetry.exporter.port = 80: this service does not run as root"
        "orin.telemetry.exporter.webFiles = [ \"tls.key\" ]: nothing names these files"
        ''orin.telemetry.grafana.listenAddress = "*": write an address alone''
        "orin.telemetry.grafana.port = 443: this service does not run as root"
        ''orin.telemetry.grafana.secretKeyFile = "secrets/key" is no absolute path''
        ''orin.telemetry.grafana.adminPasswordFile = "secrets/key" is no absolute path''
        ''orin.telemetry.grafana.adminPasswordFile = "secrets/key": this is `secretKeyFile` too''
        ''orin.telemetry.prometheus.retention = "30 days": write a number and a unit''
        ''orin.telemetry.prometheus.scrapeInterval = "five seconds": write a number and a unit''
        ''orin.telemetry.prometheus.remoteWrite = "metrics.example.org": write the scheme too''
        ''orin.telemetry.prometheus.extraScrapeConfigs = "node": this host has a job of that name''
        ''orin.llm-server.host = "0.0.0.0:8000": write an address alone''
        "orin.llm-server.metricsKeyFile is not set"
        ''orin.llm-server.apiKeyFile = "~/keys" is no absolute path''
        "orin.llm-server.environment.\"A-B\""
        ''orin.llm-server.models.main.file = "/var/lib/models/My Model.gguf" holds a space''
        ''orin.llm-server.models.main.memory = "40 %": write a share''
        "orin.llm-server.models.main.port and orin.telemetry.prometheus.port are both 9090"
        ''orin.llm-server.models.folder.file = "/var/lib/models/": write a file''
        "orin.llm-server.models.folder.port and services.openssh.ports.[0] are both 22"
        "orin.llm-server.models.folder.port = 22: this service does not run as root"
        "orin.llm-server.models.folder.extraFlags = [ \"--port=9000\" ]: an option sets one"
        ''orin.llm-server.models."Big Model": the name becomes part''
        ''orin.llm-server.models.Big Model.file = "https://example.org/model.gguf": write a file''
        ''orin.llm-server.models.Big Model.file = "https://example.org/model.gguf" is no absolute path''
        "orin.llm-gateway.environmentFile is not set"
        ''orin.llm-gateway.servers.orin-1.url = "orin-1:8000" is no address''
      ];
    };
    # And those that exclude one of the above.
    others = {
      host = imitation {
        orin.host.user = lib.mkForce "root";
        orin.host.disk.boot = lib.mkForce "nixos";
        orin.telemetry.alertmanager.enable = true;
        orin.telemetry.prometheus.enable = lib.mkForce false;
        orin.llm-server = {
          host = "0.0.0.0";
          backend = "llama-cpp";
          models.main.queue = 4;
        };
        orin.llm-gateway = {
          enable = true;
          environmentFile = "${./assertions.nix}";
        };
        orin.upgrade = {
          enable = true;
          units = [ "orin-gpu" ];
        };
        orin.cache = {
          enable = true;
          openFirewall = true;
          port = 9401;
        };
        orin.backup.enable = true;
      };
      wanted = [
        ''orin.host.user = "root": root logs in''
        ''orin.host.disk.boot = "nixos": two file systems''
        "orin.telemetry.alertmanager.enable = true: no Prometheus of this host"
        ''orin.llm-server.host = "0.0.0.0" answers everyone who reaches it''
        "orin.llm-server.models.main: llama.cpp has no `memory` and no `queue`"
        "orin.llm-gateway.servers names no model"
        "orin.upgrade.units = [ \"orin-gpu\" ]: name at least one unit, with its ending"
        "the cache listens on 127.0.0.1 only"
        "orin.cache.port and orin.telemetry.exporter.port are both 9401"
        ''orin.backup.repository = "": write where to''
        "orin.backup.passwordFile = null: name a file"
        "orin.llm-gateway.environmentFile is in the Nix store"
      ];
    };
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
lib.mapAttrs (_: case: {
  inherit (case) wanted;
  got = map (rule: rule.message) (lib.filter (rule: !rule.assertion) case.host.config.assertions);
}) cases
