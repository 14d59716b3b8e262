# OpenAI-compatible language model servers: one process, one unit and one port for each GGUF file.
{
  config,
  lib,
  pkgs,
  ...
}:
let
  cfg = config.orin.llm-server;
  common = import ../common { inherit lib config; };
  inherit (common) listening option switch;
  loopback = listening.isLoopback cfg.host;
  onGpu = cfg.device != "CPU";
  keys = "%d/api-keys";
  # systemd expands % and $ in quotes too; ours is the folder of the credentials.
  arguments = list: lib.replaceStrings [ keys "%" "$" ] [ keys "%%" "$$" ] (lib.escapeShellArgs list);
  secrets = common.secrets {
    files."orin.llm-server.apiKeyFile" = cfg.apiKeyFile;
    files."orin.llm-server.metricsKeyFile" = cfg.metricsKeyFile;
  };
  engines = {
    orinllm = name: model: {
      program = [
        (lib.getExe' cfg.package "orinllm")
        "serve"
        model.file
      ];
      flags = {
        alias = name;
        draft = model.draftModel;
        inherit (cfg) device grace insecure;
        inherit (model) context slots memory;
        inherit (model) queue mmproj;
      };
      # It says when it answers, and from then on that its scheduler moves.
      serviceConfig = {
        Type = "notify";
        WatchdogSec = cfg.watchdog;
      };
    };
    llama-cpp =
      name: model:
      let
        parallel = if model.slots == null then 1 else model.slots;
      in
      {
        program = [ (lib.getExe' cfg.llamaCppPackage "llama-server") ];
        flags = {
          alias = name;
          model = model.file;
          n-gpu-layers = if onGpu then 99 else 0;
          metrics = true;
          # Its context is that of all slots together.
          ctx-size = lib.mapNullable (context: context * parallel) model.context;
          model-draft = model.draftModel;
          inherit parallel;
          inherit (model) mmproj;
        };
        serviceConfig.Type = "exec";
      };
  };

  unit =
    name: model:
    let
      engine = engines.${cfg.backend} name model;
      folder = "orin-llm-server-${name}";
      files = lib.filter (file: file != null && file != "mtp") [
        model.file
        model.draftModel
        model.mmproj
      ];
    in
    {
      description = "Language model server of ${name} (${cfg.backend})";
      wantedBy = [ "multi-user.target" ];
      wants = [ "network-online.target" ];
      # A disk that comes late, or is `nofail`: the unit waits for its mount. The engine says itself what is
      # wrong with a model, and `systemctl status` has it; llama.cpp says it in twenty lines.
      unitConfig.RequiresMountsFor = files;
      unitConfig.AssertPathExists = lib.optionals (cfg.backend == "llama-cpp") files;
      after = [
        "network-online.target"
        "nvpmodel.service"
        "jetson_clocks.service"
      ];
      environment = {
        XDG_CACHE_HOME = "/var/cache/${folder}";
        PYTHONUNBUFFERED = "1";
      }
      // lib.mapAttrs (_: lib.replaceStrings [ "%" ] [ "%%" ]) cfg.environment;
      # Three failures within ten minutes and it stays down: a missing model does not come by itself. An
      # address that the network gives does: then it is tried without end.
      startLimitIntervalSec = if listening.always cfg.host then 600 else 0;
      startLimitBurst = 3;
      serviceConfig =
        import ../common/hardening.nix {
          gpu = onGpu;
          jit = true;
        }
        // engine.serviceConfig
        // {
          ExecStart = arguments (
            engine.program
            ++ common.flags (
              engine.flags
              // {
                inherit (cfg) host;
                inherit (model) port;
                api-key-file = lib.mapNullable (_: keys) cfg.apiKeyFile;
              }
            )
            ++ model.extraFlags
          );
          TimeoutStartSec = cfg.startTimeout;
          # It ends what runs, or cuts it, within the grace.
          TimeoutStopSec = cfg.grace + 15;
          Restart = "on-failure";
          RestartSec = if listening.always cfg.host then 1 else 10;
          DynamicUser = true;
          CacheDirectory = folder;
          # The file alone, wherever it lies: its folders need not be open to the server.
          BindReadOnlyPaths = map (file: "-${file}") files;
          ProtectHome = "tmpfs";
          RestrictAddressFamilies = "AF_INET AF_INET6 AF_UNIX";
        }
        // lib.optionalAttrs loopback {
          IPAddressDeny = "any";
          IPAddressAllow = "localhost";
        }
        // lib.optionalAttrs (cfg.apiKeyFile != null) {
          LoadCredential = "api-keys:${cfg.apiKeyFile}";
        }
        // lib.optionalAttrs (cfg.apiKeyFile != null && cfg.backend == "orinllm") {
          # The credential is a copy, which systemd 260 and later makes anew before the signal.
          RefreshOnReload = "credentials";
          ExecReload = "${lib.getExe' pkgs.coreutils "kill"} -HUP $MAINPID";
        };
    };

  otherFile =
    example: description:
    lib.mkOption {
      type = lib.types.nullOr (lib.types.either lib.types.str lib.types.path);
      default = null;
      apply = lib.mapNullable toString;
      inherit example description;
    };

  modelOptions = {
    options = {
      file = lib.mkOption {
        type = lib.types.either lib.types.str lib.types.path;
        apply = toString;
        example = "/var/lib/models/Llama-3.2-1B-Instruct-Q6_K.gguf";
        description = ''
          The GGUF file, outside the Nix store. It need not exist when the system is built; the server
          says so when it starts without one.
        '';
      };

      draftModel = otherFile "/var/lib/models/Llama-3.2-1B-Instruct-Q6_K.gguf" ''
        A smaller GGUF file of the same vocabulary, which guesses tokens while one answer runs alone; the
        answers stay the same. It takes its own memory. "mtp": the block that the model's own file has for it.
      '';

      mmproj = otherFile "/var/lib/models/mmproj-gemma-3-4b-it-f16.gguf" ''
        llama.cpp's mmproj file of the same model, with which it sees pictures. It takes its own memory.
      '';

      port = listening.port 8000 8001 "The port that this model's server listens on.";

      context =
        option (lib.types.nullOr lib.types.ints.positive) null 8192
          "The longest prompt and answer together, in tokens. null: what the file and the memory allow.";

      slots =
        option (lib.types.nullOr lib.types.ints.positive) null 4
          "How many requests are worked on at once. null: the engine's own choice, with llama.cpp 1.";

      memory = option (lib.types.nullOr lib.types.str) null "40%" ''
        How much of the memory that is free when this server starts may hold keys and values. null:
        the engine's own choice. For llama.cpp, context and slots decide.
      '';

      queue =
        option (lib.types.nullOr lib.types.ints.positive) null 64
          "How many requests may wait; one more is answered 429. null: the engine's own choice.";

      extraFlags =
        option (lib.types.listOf lib.types.str) [ ] [ "--verbose" ]
          "Further arguments of this server.";
    };
  };
in
{
  imports = [
    ../common/board.nix
    ../common/ports.nix
  ];

  options.orin.llm-server = {
    enable = lib.mkEnableOption "OpenAI-compatible language model servers";

    backend = option (lib.types.enum [
      "orinllm"
      "llama-cpp"
    ]) "orinllm" "llama-cpp" "What runs the models: this project's engine, or llama.cpp's server.";

    package = lib.mkPackageOption pkgs "tinygrad-orin" { };

    llamaCppPackage = lib.mkPackageOption pkgs "llama-cpp-orin" { example = "llama-cpp"; };

    models = lib.mkOption {
      type = lib.types.attrsOf (lib.types.submodule modelOptions);
      default = { };
      example = lib.literalExpression ''
        {
          small.file = "/var/lib/models/Llama-3.2-1B-Instruct-Q6_K.gguf";
          large = {
            file = "/var/lib/models/Llama-3.1-8B-Instruct-Q4_K_M.gguf";
            port = 8001;
            context = 8192;
          };
        }
      '';
      description = ''
        The models, by the name that clients call them, which their units have too:
        `orin-llm-server-NAME.service`. Each has a process, a port and memory of its own, and all of
        them run at once.
      '';
    };

    device = lib.mkOption {
      type = lib.types.nullOr lib.types.str;
      default = config.orin.tinygrad.device or null;
      defaultText = lib.literalExpression "config.orin.tinygrad.device";
      example = "CPU";
      description = "tinygrad's device; null lets the engine take the best that opens.";
    };

    host = listening.listenAddress ''
      The address to listen on. Beyond the loopback it needs `orin.llm-server.apiKeyFile`.
    '';

    apiKeyFile = option (lib.types.nullOr lib.types.str) null "/var/lib/secrets/llm-keys" ''
      A file on the board with the keys that clients show, one a line. Root's alone will do; this
      project's engine reads it again at `systemctl reload orin-llm-server-NAME`. null: everyone who
      reaches the port is answered.
    '';

    insecure = switch false "Whether to listen beyond the loopback without keys.";

    openFirewall = listening.openFirewall "the servers' ports";

    environment = option (lib.types.attrsOf lib.types.str) { } {
      DEBUG = "2";
    } "Variables of the servers.";

    startTimeout = option lib.types.ints.positive 900 3600 ''
      Seconds until a server must answer: it reads the model, and compiles kernels that are not in its
      cache. One that ends before is a failed unit at once.
    '';

    watchdog = option lib.types.ints.positive 60 20 ''
      Seconds without a sign of life of the scheduler after which systemd kills and restarts a server.
      Longer than the longest step: a part of a prompt. llama.cpp gives no such sign.
    '';

    grace =
      option lib.types.ints.unsigned 30 5
        "Seconds that running answers have when a server is told to stop.";

    metrics = lib.mkOption {
      type = lib.types.bool;
      default = config.orin.telemetry.enable or false;
      defaultText = lib.literalExpression "config.orin.telemetry.enable";
      example = false;
      description = "Whether this board's Prometheus reads `/metrics` of each server.";
    };

    metricsKeyFile = option (lib.types.nullOr lib.types.str) null "/var/lib/secrets/llm-metrics-key" ''
      A file on the board with one of the keys of `orin.llm-server.apiKeyFile`, which this board's
      Prometheus shows: servers that ask for keys ask for one on `/metrics` too.
    '';
  };

  config = lib.mkIf cfg.enable {
    assertions = import ./rules.nix { inherit config lib secrets; };

    orin.board.required = lib.mkIf onGpu true;
    orin.ports = lib.mapAttrs' (
      name: model: lib.nameValuePair "orin.llm-server.models.${name}.port" model.port
    ) cfg.models;

    networking.firewall.allowedTCPPorts = lib.mkIf cfg.openFirewall (
      lib.mapAttrsToList (_: model: model.port) cfg.models
    );

    system.preSwitchChecks = secrets.checks "orinLlmKeys";

    systemd.services = lib.mapAttrs' (
      name: model: lib.nameValuePair "orin-llm-server-${name}" (unit name model)
    ) cfg.models;
  };
}
