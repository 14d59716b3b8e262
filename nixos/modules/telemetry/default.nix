# What the board does, in watts, degrees and joules per token: exporter, Prometheus, Grafana.
# Rules and dashboards are the files of ../../../telemetry; everything listens on the loopback.
{
  config,
  lib,
  pkgs,
  ...
}:
let
  cfg = config.orin.telemetry;
  common = import ../common { inherit lib config; };
  inherit (common) check listening paths;
  inherit (common) option switch;
in
{
  imports = [
    ./exporter.nix
    ./grafana.nix
    ../common/ports.nix
    ./prometheus.nix
  ];

  options.orin.telemetry = {
    enable = lib.mkEnableOption "telemetry of the board: exporter, Prometheus, Grafana";

    nodeExporter = switch true ''
      Whether node_exporter reports CPU, memory, disks and network. Its thermal_zone collector is
      off: on an Orin it waits for ever at the first zone that is powered down.
    '';

    textfileDirectory =
      option lib.types.path "/var/lib/orin-textfile" "/var/lib/node-exporter/textfile"
        ''
          Where `orinbench llama-bench --textfile` leaves its figures for node_exporter. The group
          `video` may write there.
        '';
  };

  config = lib.mkIf cfg.enable {
    assertions = [
      (check.rule "orin.telemetry.enable" true (pkgs ? tinygrad-orin)
        "this nixpkgs has no tinygrad-orin; import nixosModules.default, or add its overlay to nixpkgs.overlays"
      )
      (check.rule "orin.telemetry.textfileDirectory" (toString cfg.textfileDirectory)
        (paths.ownable cfg.textfileDirectory)
        ''the folder is given to the group video; write one of its own and no system's, as in "/var/lib/orin-textfile"''
      )
      (check.rule "orin.telemetry.textfileDirectory" (toString cfg.textfileDirectory) (
        !lib.elem (toString cfg.textfileDirectory) (
          paths.homes config ++ [ (toString (config.orin.host.modelFolder or "")) ]
        )
      ) "this is somebody's already, a home or the models' folder; write one of its own")
    ];

    orin.ports = lib.optionalAttrs cfg.nodeExporter {
      "services.prometheus.exporters.node.port" = config.services.prometheus.exporters.node.port;
    };

    systemd.tmpfiles.rules = [ "d ${toString cfg.textfileDirectory} 0775 root video -" ];
    services.prometheus.exporters.node = lib.mkIf cfg.nodeExporter {
      enable = true;
      listenAddress = lib.mkDefault listening.loopback;
      # Which units failed: the alert OrinUnitFailed asks for it.
      enabledCollectors = [ "systemd" ];
      disabledCollectors = [ "thermal_zone" ];
      extraFlags = [ "--collector.textfile.directory=${toString cfg.textfileDirectory}" ];
    };
  };
}
