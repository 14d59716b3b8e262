# The board at its full speed, and proof of it. An AGX Orin starts in 30 W mode: 8 of 16 SMs off,
# the GPU at 612 of 1300 MHz. A benchmark in that mode says nothing about the board.
{
  config,
  lib,
  options,
  pkgs,
  ...
}:
let
  cfg = config.orin.performance;
  powerMode = "${lib.getExe pkgs.python3} ${./power_mode.py}";
  mode = lib.escapeShellArg cfg.powerMode;
in
{
  imports = [ ./board.nix ];

  options.orin.performance = {
    enable = lib.mkEnableOption "a fixed power mode and fixed clocks, read back after boot";

    powerMode = lib.mkOption {
      type = lib.types.str;
      default = "MAXN";
      example = "MODE_30W";
      description = ''
        The power mode, by its NAME in the board's `/etc/nvpmodel.conf`. On an AGX Orin with
        JetPack 6 these are `MAXN`, `MODE_15W`, `MODE_30W` and `MODE_50W`.
      '';
    };

    lockClocks = lib.mkOption {
      type = lib.types.bool;
      default = true;
      example = false;
      description = "Whether to pin the GPU, CPU and memory clocks to their maximum (`jetson_clocks`).";
    };

    cpuGovernor = lib.mkOption {
      type = lib.types.nullOr lib.types.str;
      default = "performance";
      example = "schedutil";
      description = "The CPU's frequency governor. null leaves the kernel's.";
    };

    zram = lib.mkOption {
      type = lib.types.bool;
      default = false;
      example = true;
      description = ''
        Whether to swap into compressed memory. Off by default: the GPU shares this memory, what it
        has mapped cannot be swapped, and a model that does not fit should fail and not crawl.
      '';
    };

    transparentHugepages = lib.mkOption {
      type = lib.types.enum [
        "always"
        "madvise"
        "never"
      ];
      default = "madvise";
      example = "always";
      description = "Transparent huge pages of the CPU's mappings; the GPU's are nvmap's own.";
    };

    readback = lib.mkOption {
      type = lib.types.bool;
      default = true;
      example = false;
      description = ''
        Whether `orin-performance-readback.service` compares the board with what was asked: the
        recorded mode, cores, TPC mask, clock ceilings, pinned clocks. It fails, and names each
        value that is off, so that `systemctl is-system-running` says `degraded`.
      '';
    };

    root = lib.mkOption {
      type = lib.types.path;
      default = "/";
      example = "/var/lib/fake-board";
      description = "Where `sys`, `etc/nvpmodel.conf` and `var/lib/nvpmodel` lie; for tests.";
    };
  };

  config = lib.mkIf cfg.enable (
    lib.mkMerge [
      {
        orin.board.required = true;

        boot.kernelParams = [ "transparent_hugepage=${cfg.transparentHugepages}" ];
        powerManagement.cpuFreqGovernor = lib.mkIf (cfg.cpuGovernor != null) cfg.cpuGovernor;
        zramSwap.enable = cfg.zram;

        systemd.services.orin-performance-readback = lib.mkIf cfg.readback {
          description = "The board is in the power mode ${cfg.powerMode}";
          wantedBy = [ "multi-user.target" ];
          after = [
            "nvpmodel.service"
            "jetson_clocks.service"
            "cpufreq.service"
          ];
          serviceConfig = import ./hardening.nix { } // {
            Type = "oneshot";
            RemainAfterExit = true;
            ExecStart = "${powerMode} check ${mode} --root ${cfg.root}${lib.optionalString cfg.lockClocks " --pinned"}";
            DynamicUser = true;
            PrivateNetwork = true;
            RestrictAddressFamilies = "none";
          };
        };
      }

      (lib.optionalAttrs (options.hardware ? nvidia-jetpack) {
        hardware.nvidia-jetpack.maxClock = cfg.lockClocks;

        # By name, looked up on the board: the numbers differ between modules and releases, and
        # without one nvpmodel takes the file's default.
        systemd.services.nvpmodel = lib.mkIf config.services.nvpmodel.enable {
          before = [ "jetson_clocks.service" ];
          serviceConfig = {
            ExecStart = lib.mkForce "${powerMode} set ${mode} --nvpmodel ${pkgs.nvidia-jetpack.l4t-nvpmodel}/bin/nvpmodel";
            # A name that the board does not have: trying again every two seconds would not help.
            RestartPreventExitStatus = 2;
          };
        };
      })
    ]
  );
}
