# What a board cannot make again: benchmarks' history, Grafana's database and its key. restic takes it away.
{
  config,
  lib,
  pkgs,
  ...
}:
let
  cfg = config.orin.backup;
  common = import ./common { inherit lib config; };
  inherit (common) check option paths;
  secrets = common.secrets { files."orin.backup.passwordFile" = cfg.passwordFile; };
  copies = "/var/lib/orin-backup";
  saved = [ copies ] ++ cfg.paths;
  grafana = config.services.grafana.enable;
in
{
  options.orin.backup = {
    enable = lib.mkEnableOption "a backup of the benchmarks' history and of Grafana, by restic";

    repository =
      option lib.types.str "" "sftp:backup@nas:/orin-1"
        "Where to, as restic writes it. The backup makes it where it is not there yet.";

    passwordFile = option (lib.types.nullOr lib.types.str) null "/var/lib/secrets/backup" ''
      A file on the board with the repository's password. Keep it elsewhere too: without it nobody
      can read the backup.
    '';

    databases = lib.mkOption {
      type = lib.types.attrsOf lib.types.str;
      default =
        lib.optionalAttrs grafana { grafana = "${config.services.grafana.dataDir}/data/grafana.db"; }
        // lib.optionalAttrs (config.orin.host.enable or false) {
          history = "${
            config.users.users.${config.orin.host.user}.home
          }/.local/state/tinygrad-orin/history.db";
        };
      defaultText = lib.literalMD "Grafana's, and the history of `orinbench` of `orin.host.user`";
      example = {
        history = "/home/alice/.local/state/tinygrad-orin/history.db";
      };
      description = "SQLite files by name. A copy that is whole is taken while they are written to.";
    };

    paths = lib.mkOption {
      type = lib.types.listOf lib.types.str;
      default = [
        "/etc/nixos"
      ]
      # Where this board makes one of the secrets.
      ++ lib.optional (
        grafana
        && config.orin.telemetry.enable or false
        && lib.elem null (
          lib.attrVals [ "secretKeyFile" "adminPasswordFile" ] config.orin.telemetry.grafana
        )
      ) "/var/lib/orin-grafana"
      ++ lib.optional (config.orin.cache.enable or false) "/var/lib/orin-cache"
      ++ lib.filter (file: file != null) [
        (config.orin.llm-server.apiKeyFile or null)
        (config.orin.llm-server.metricsKeyFile or null)
      ];
      defaultText = lib.literalMD "the flake in /etc/nixos, Grafana's secrets, the cache's key, the servers' keys";
      example = [ "/var/lib/orin-grafana" ];
      description = "Files and folders beside the databases.";
    };

    dates = option lib.types.str "daily" "hourly" "When, as systemd.time(7) writes it.";
  };

  config = lib.mkIf cfg.enable {
    assertions =
      secrets.assertions
      ++ [
        (check.rule "orin.backup.repository" cfg.repository (
          cfg.repository != ""
        ) ''write where to, as restic does: "sftp:backup@nas:/orin-1", "/mnt/usb/orin-1"'')
        (check.rule "orin.backup.repository" (lib.head (lib.splitString "://" cfg.repository))
          (
            cfg.repository == ""
            || check.matches "(/|sftp:[^/:]+:|sftp://|(rest|s3|b2|azure|gs|swift|rclone):).+" cfg.repository
          )
          ''restic would make a folder of this name wherever it runs; write a path from the root or one of its schemes, as in "sftp:backup@nas:/orin-1"''
        )
        (check.rule "orin.backup.repository" cfg.repository
          (!lib.any (path: lib.hasPrefix "${lib.removeSuffix "/" path}/" "${cfg.repository}/") saved)
          ''what lies there is backed up, and the backup with it; write another place, as in "/mnt/usb/orin-1"''
        )
        (check.rule "orin.backup.repository" cfg.repository
          (
            !lib.hasPrefix "/" cfg.repository
            || lib.any (
              mount:
              !check.matches "/(boot|nix|nix/store)?" mount && lib.hasPrefix "${mount}/" "${cfg.repository}/"
            ) (lib.attrNames config.fileSystems)
          )
          ''this is the disk that it saves, which takes the backup along; name a mount of another, as in `fileSystems."/mnt/usb"`, or another machine''
        )
        (check.noPassword "orin.backup.repository" cfg.repository
          "set `services.restic.backups.orin.environmentFile` with RESTIC_REST_USERNAME and RESTIC_REST_PASSWORD"
        )
        (check.calendar "orin.backup.dates" cfg.dates)
        (check.rule "orin.backup.paths" cfg.paths (lib.all (
          path: paths.plain path && path != "/"
        ) cfg.paths) ''write each from the root, and not the root itself, as in "/var/lib/orin-grafana"'')
        (check.rule "orin.backup.passwordFile" cfg.passwordFile (
          cfg.passwordFile != null
        ) ''name a file on the board with a password, as in "/var/lib/secrets/backup"'')
      ]
      ++ lib.concatLists (
        lib.mapAttrsToList (name: file: [
          (check.rule "orin.backup.databases" name (check.matches "[A-Za-z0-9_.-]+" name)
            ''the copy is a file of this name; letters, digits, _ . and - alone, as in "history"''
          )
          (check.rule "orin.backup.databases.${check.show name}" file (
            !lib.hasPrefix "${copies}/" file
          ) "the copies are made there; write the file that is to be copied")
          (paths.file "orin.backup.databases.${check.show name}" file "where nothing changes"
            "/home/alice/.local/state/tinygrad-orin/history.db"
          )
        ]) cfg.databases
      );
    system.preSwitchChecks = secrets.checks "orinBackup";

    # A disk that is not plugged in is a failed backup, and none on the disk that it saves.
    systemd.services.restic-backups-orin.unitConfig = lib.mkIf (lib.hasPrefix "/" cfg.repository) {
      RequiresMountsFor = [ cfg.repository ];
    };

    services.restic.backups.orin = {
      initialize = lib.mkDefault true;
      inherit (cfg) repository;
      passwordFile = toString cfg.passwordFile;
      paths = saved;
      timerConfig = {
        OnCalendar = cfg.dates;
        Persistent = true;
      };
      pruneOpts = lib.mkDefault [
        "--keep-daily 7"
        "--keep-weekly 5"
        "--keep-monthly 12"
      ];
      # A script without a first line of its own: a copy that fails is a failed backup.
      backupPrepareCommand = ''
        set -eu
        # What a power cut has left of an earlier one.
        ${lib.getExe pkgs.restic} unlock --quiet || true
        # A host that is deployed from elsewhere has no flake here, and restic calls that a failure.
        mkdir -p ${copies} /etc/nixos
        chmod 0700 ${copies}
      ''
      + lib.concatStrings (
        lib.mapAttrsToList (name: file: ''
          if [ -e ${lib.escapeShellArg file} ]; then
            ${lib.getExe pkgs.sqlite} ${lib.escapeShellArg file} ${lib.escapeShellArg ".backup '${copies}/${name}.db'"}
          fi
        '') cfg.databases
      );
    };
  };
}
