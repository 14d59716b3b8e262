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
  inherit (import ../common { inherit lib config; })
    check
    option
    switch
    words
    ;
  # Without JetPack's NixOS module these options do not exist.
  jetpack = {
    som = "generic";
    super = false;
  }
  // config.hardware.nvidia-jetpack or { };
  inherit (jetpack) som;
  fast = jetpack.super;
  # The modes that a module's files have, of all its sizes (nvpmodel_p3701_*.conf, nvpmodel_p3767_*.conf;
  # "Supported Modes and Power Efficiency" of the Jetson Linux 36.4 guide). null: not known.
  modes =
    lib.mapNullable words
      {
        orin-agx = "MAXN MODE_15W MODE_30W MODE_40W MODE_50W";
        orin-nx = if fast then "MAXN_SUPER 10W 15W 20W 25W 40W" else "MAXN 10W 15W 20W 25W";
        orin-nano = "7W 7W_AI 7W_CPU 10W 15W" + lib.optionalString fast " 25W MAXN_SUPER";
      }
      .${som} or null;
  governors = words "conservative ondemand performance powersave schedutil userspace";
  # With the newer releases an AGX has super modes too, whose names are not known here.
  known = if som == "orin-agx" && fast then null else modes;
in
{
  imports = [ ../common/board.nix ];

  options.orin.performance = {
    enable = lib.mkEnableOption "a fixed power mode and fixed clocks, read back after boot";

    powerMode = lib.mkOption {
      type = lib.types.str;
      default =
        if fast then
          "MAXN_SUPER"
        else if som == "orin-nano" then
          "15W"
        else
          "MAXN";
      defaultText = lib.literalMD "the fastest of the module: `MAXN`, on a Nano `15W`, with `hardware.nvidia-jetpack.super` `MAXN_SUPER`";
      example = "MODE_30W";
      description = ''
        The power mode, by its NAME in the board's `/etc/nvpmodel.conf`. On an AGX Orin with
        JetPack 6 these are `MAXN`, `MODE_15W`, `MODE_30W` and `MODE_50W`.
      '';
    };

    lockClocks = switch true "Whether to pin the GPU, CPU and memory clocks to their maximum (`jetson_clocks`).";

    cpuGovernor = option (lib.types.nullOr (
      lib.types.enum governors
    )) "performance" "schedutil" "The CPU's frequency governor. null leaves the kernel's.";

    zram = switch false ''
      Whether to swap into compressed memory. Off by default: the GPU shares this memory, what it
      has mapped cannot be swapped, and a model that does not fit should fail and not crawl. An NX or
      Nano of `orin.host` swaps so in any case, for the kernels that it builds.
    '';

    transparentHugepages = option (lib.types.enum [
      "always"
      "madvise"
      "never"
    ]) "madvise" "always" "Transparent huge pages of the CPU's mappings; the GPU's are nvmap's own.";

    readback = switch true ''
      Whether `orin-performance-readback.service` compares the board with what was asked: the
      recorded mode, cores, TPC mask, clock ceilings, pinned clocks. It fails, and names each
      value that is off, so that `systemctl is-system-running` says `degraded`.
    '';
  };

  config = lib.mkIf cfg.enable (
    lib.mkMerge [
      {
        orin.board.required = true;
        assertions = [
          (check.rule "orin.performance.powerMode" cfg.powerMode
            (if known == null then check.matches "[A-Z0-9_]+" cfg.powerMode else lib.elem cfg.powerMode known)
            "no ${som}${lib.optionalString fast " in super mode"} has it; write ${
              if known == null then "a NAME of its nvpmodel.conf" else "one of ${lib.concatStringsSep ", " known}"
            }"
          )
        ];

        boot.kernelParams = [ "transparent_hugepage=${cfg.transparentHugepages}" ];
        powerManagement.cpuFreqGovernor = lib.mkIf (cfg.cpuGovernor != null) (
          lib.mkDefault cfg.cpuGovernor
        );
        zramSwap.enable = lib.mkIf cfg.zram true;

        systemd.services.orin-performance-readback = lib.mkIf cfg.readback {
          description = "The board is in the power mode ${cfg.powerMode}";
          wantedBy = [ "multi-user.target" ];
          after = [
            "nvpmodel.service"
            "jetson_clocks.service"
            "cpufreq.service"
          ];
          serviceConfig = import ../common/hardening.nix { } // {
            Type = "oneshot";
            RemainAfterExit = true;
            ExecStart = "${powerMode} check ${mode}${lib.optionalString cfg.lockClocks " --pinned"}";
            DynamicUser = true;
            PrivateNetwork = true;
            RestrictAddressFamilies = "none";
          };
        };
      }

      (lib.optionalAttrs (options.hardware ? nvidia-jetpack) {
        hardware.nvidia-jetpack.maxClock = lib.mkDefault cfg.lockClocks;

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
