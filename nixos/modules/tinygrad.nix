# Patched tinygrad for the users of a board, with the rights that its GPU needs.
{
  config,
  lib,
  pkgs,
  ...
}:
let
  cfg = config.orin.tinygrad;
  inherit (import ./common { inherit lib config; }) check option switch;
  groups = [
    "video"
    "render"
  ];
  # Directory nodes below /dev/nvgpu have generic kernel names: match by subsystem, as NVIDIA's own
  # rules do (99-tegra-devices.rules).
  gpuNodes = [
    ''SUBSYSTEM=="nvidia-gpu-v2"''
    ''SUBSYSTEM=="nvidia-gpu-v2-power"''
    ''KERNEL=="nvmap"''
    ''KERNEL=="host1x-fence"''
    ''KERNEL=="renderD128"''
  ];
in
{
  imports = [ ./common/board.nix ];

  options.orin.tinygrad = {
    enable = lib.mkEnableOption "tinygrad with the Jetson Orin patch series";

    package = lib.mkPackageOption pkgs [ "python3Packages" "tinygrad" ] {
      example = "python3Packages.tinygrad.override { cudaSupport = false; }";
    };

    extraPythonPackages = lib.mkOption {
      type = lib.types.functionTo (lib.types.listOf lib.types.package);
      default = _: [ ];
      defaultText = lib.literalExpression "_: [ ]";
      example = lib.literalExpression "packages: [ packages.numpy packages.pillow ]";
      description = "What else the system's `python3` imports.";
    };

    tools = switch true "Whether to install `orinbench`, `nvgpusim` and llama.cpp too.";

    users =
      option (lib.types.listOf lib.types.str) [ ] [ "alice" ]
        "Users that may use the GPU: they join the groups `video` and `render`.";

    device = option (lib.types.nullOr lib.types.str) null "CUDA" ''
      tinygrad's device for every login shell, as its variable `DEV` has it. null lets tinygrad
      choose: its own driver where `/dev/nvgpu/igpu0/ctrl` exists.
    '';

    environment = option (lib.types.attrsOf lib.types.str) { } {
      BEAM = "2";
    } "Further variables of tinygrad for every login shell.";

    selfTest = switch true ''
      Whether `orin-gpu.service` multiplies two matrices on the GPU at boot, as an unprivileged
      user in the groups `video` and `render`, and fails where no GPU answers.
    '';

    gpuBuilds = switch false ''
      Whether Nix builds on this board may use the GPU. Derivations with
      `requiredSystemFeatures = [ "tegra-gpu" ]` see its device nodes in their sandbox, and the
      group `nixbld` may open them. `nix build .#gpu-check` then runs tinygrad inside a build.
    '';
  };

  config = lib.mkIf cfg.enable (
    lib.mkMerge [
      {
        orin.board.required = true;
        assertions = [
          (check.device "orin.tinygrad.device" cfg.device)
        ]
        ++ check.variables "orin.tinygrad.environment" cfg.environment
        ++ map (
          user:
          check.rule "orin.tinygrad.users" user (
            config.users.users ? ${user}
          ) "there is no such user on this host; declare it with `users.users.NAME.isNormalUser = true`"
        ) cfg.users;

        environment.systemPackages = [
          (pkgs.python3.withPackages (packages: [ cfg.package ] ++ cfg.extraPythonPackages packages))
        ]
        ++ lib.optionals cfg.tools [
          pkgs.tinygrad-orin
          pkgs.llama-cpp-orin
        ];
        environment.sessionVariables =
          lib.optionalAttrs (cfg.device != null) { DEV = cfg.device; } // cfg.environment;

        users.groups = lib.genAttrs groups (_: {
          members = cfg.users;
        });

        systemd.services.orin-gpu = lib.mkIf cfg.selfTest {
          description = "tinygrad computes on the GPU";
          wantedBy = [ "multi-user.target" ];
          # nvpmodel changes the TPC mask only while nobody has the GPU open.
          after = [ "nvpmodel.service" ];
          environment = {
            XDG_CACHE_HOME = "/var/cache/orin-gpu";
          }
          // lib.optionalAttrs (cfg.device != null) { DEV = cfg.device; };
          serviceConfig = import ./common/hardening.nix { gpu = true; } // {
            Type = "oneshot";
            RemainAfterExit = true;
            # Ten times what compiling takes; a GPU that hangs must not keep the boot from its end.
            TimeoutStartSec = 300;
            ExecStart = "${
              lib.getExe (pkgs.python3.withPackages (_: [ cfg.package ]))
            } ${../../overlays/checks/gpu.py}";
            DynamicUser = true;
            CacheDirectory = "orin-gpu";
            RestrictAddressFamilies = "AF_UNIX";
            IPAddressDeny = "any";
            PrivateNetwork = true;
          };
        };
      }

      (lib.mkIf cfg.gpuBuilds {
        nix.settings.system-features = [ "tegra-gpu" ];
        programs.nix-required-mounts = {
          enable = true;
          allowedPatterns.tegra-gpu = {
            paths = [
              "/dev/nvgpu"
              "/dev/nvmap"
              "/dev/host1x-fence"
              "/dev/dri"
              "/sys/devices/platform/bus@0/17000000.gpu"
              pkgs.addDriverRunpath.driverLink
              config.hardware.graphics.package
            ]
            ++ config.hardware.graphics.extraPackages;
            unsafeFollowSymlinks = true;
          };
        };
        # A build runs with the group nixbld alone, the nodes belong to video and render.
        services.udev.extraRules = lib.concatMapStrings (match: ''
          ${match}, RUN+="${lib.getExe' pkgs.acl "setfacl"} -m g:nixbld:rw $devnode"
        '') gpuNodes;
      })
    ]
  );
}
