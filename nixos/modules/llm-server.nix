# An OpenAI-compatible server on one GGUF file.
#
# tinygrad's server listens on every interface and cannot be told otherwise. So the engine, whichever
# it is, runs in a network of its own with nothing but a loopback: it can reach nobody. The way in is a
# socket of systemd (`systemd-socket-proxyd`), and with metrics a counting proxy in front of that:
#
#   client -> [orin-llm-server-metrics] -> orin-llm-server-proxy -> orin-llm-server
{
  config,
  lib,
  pkgs,
  ...
}:
let
  cfg = config.orin.llm-server;
  host = config.networking.hostName;
  listening = import ./listening.nix { inherit lib; };
  model = toString cfg.model;
  # Inside the engine's own network: any port will do.
  enginePort = 8000;
  engineUrl = "http://127.0.0.1:${toString enginePort}";
  bracketed = if lib.hasInfix ":" cfg.host then "[${cfg.host}]" else cfg.host;
  reachable =
    if
      lib.elem cfg.host [
        "0.0.0.0"
        "::"
      ]
    then
      "localhost"
    else
      bracketed;
  # Where the socket is: at the server's address, or behind the proxy that counts.
  entrance = if cfg.metrics.enable then "127.0.0.1:${toString cfg.metrics.innerPort}" else address;
  address = "${bracketed}:${toString cfg.port}";
  ofServer = {
    bindsTo = [ "orin-llm-server.service" ];
    after = [ "orin-llm-server.service" ];
  };
  curl = "${lib.getExe pkgs.curl} --silent --show-error --fail --output /dev/null";

  engines = {
    tinygrad = {
      package = pkgs.python3.withPackages (_: [ cfg.tinygradPackage ]);
      command = [
        "bin/python3"
        "-m"
        "tinygrad.llm"
        "--model"
        model
        "--max_context"
        (toString cfg.maxContext)
        "--serve"
        (toString enginePort)
      ];
      # It has one thread: it answers between two requests.
      healthPath = "/v1/models";
    };
    llama-cpp = {
      package = cfg.llamaCppPackage;
      command = [
        "bin/llama-server"
        "--model"
        model
        "--ctx-size"
        (toString cfg.maxContext)
        "--host"
        "127.0.0.1"
        "--port"
        (toString enginePort)
        "--n-gpu-layers"
        "99"
        "--parallel"
        (toString cfg.parallel)
      ];
      healthPath = "/health";
    };
  };
  engine = engines.${cfg.backend};
in
{
  imports = [ ./board.nix ];

  options.orin.llm-server = {
    enable = lib.mkEnableOption "an OpenAI-compatible language model server";

    backend = lib.mkOption {
      type = lib.types.enum [
        "tinygrad"
        "llama-cpp"
      ];
      default = "tinygrad";
      example = "llama-cpp";
      description = ''
        What runs the model. tinygrad's server takes one request at a time, llama.cpp's
        `orin.llm-server.parallel` of them.
      '';
    };

    tinygradPackage = lib.mkOption {
      type = lib.types.package;
      default = pkgs.python3Packages.tinygrad;
      defaultText = lib.literalExpression "pkgs.python3Packages.tinygrad";
      example = lib.literalExpression "pkgs.python3Packages.tinygrad.override { cudaSupport = false; }";
      description = "The tinygrad of the backend `tinygrad`.";
    };

    llamaCppPackage = lib.mkOption {
      type = lib.types.package;
      default = pkgs.llama-cpp-orin;
      defaultText = lib.literalExpression "pkgs.llama-cpp-orin";
      example = lib.literalExpression "pkgs.llama-cpp";
      description = "The llama.cpp of the backend `llama-cpp`.";
    };

    model = lib.mkOption {
      type = lib.types.nullOr (lib.types.either lib.types.str lib.types.path);
      default = null;
      example = "/var/lib/models/Llama-3.2-1B-Instruct-Q6_K.gguf";
      description = ''
        The GGUF file, outside the Nix store. It need not exist when the system is built; the server
        says so when it starts without one.
      '';
    };

    maxContext = lib.mkOption {
      type = lib.types.ints.positive;
      default = 4096;
      example = 8192;
      description = "The longest context, in tokens. The key-value cache is allocated for all of it.";
    };

    parallel = lib.mkOption {
      type = lib.types.ints.positive;
      default = 1;
      example = 4;
      description = "How many requests the engine works on at once. tinygrad's works on one.";
    };

    device = lib.mkOption {
      type = lib.types.nullOr lib.types.str;
      default = config.orin.tinygrad.device or null;
      defaultText = lib.literalExpression "config.orin.tinygrad.device";
      example = "CPU";
      description = "tinygrad's device, as its variable `DEV` has it; null lets tinygrad choose.";
    };

    host = listening.listenAddress ''
      The address to listen on. Neither engine asks for a password here: beyond the loopback put a
      reverse proxy with authentication in front.
    '';

    port = listening.port 8000 8080 "The port to listen on.";

    openFirewall = listening.openFirewall "the port";

    environment = lib.mkOption {
      type = lib.types.attrsOf lib.types.str;
      default = { };
      example = {
        BEAM = "2";
      };
      description = "Variables of the engine.";
    };

    extraFlags = lib.mkOption {
      type = lib.types.listOf lib.types.str;
      default = [ ];
      example = [ "--warmup" ];
      description = "Further arguments of the engine.";
    };

    startTimeout = lib.mkOption {
      type = lib.types.ints.positive;
      default = 900;
      example = 3600;
      description = ''
        Seconds until the server must answer: it reads the model and compiles its kernels first, and
        with `BEAM` it searches them.
      '';
    };

    metrics = {
      enable = lib.mkOption {
        type = lib.types.bool;
        default = config.orin.telemetry.enable or false;
        defaultText = lib.literalExpression "config.orin.telemetry.enable";
        example = true;
        description = ''
          Whether requests pass a proxy that counts them, their tokens, the queue and the time to the
          first token, for the dashboard of language models.
        '';
      };

      port = listening.port 9403 9503 "Where Prometheus reads them, on the loopback.";

      innerPort = listening.port 8001 18000 "The port between the proxy and the engine, on the loopback.";
    };

    healthCheck = {
      enable = lib.mkOption {
        type = lib.types.bool;
        default = true;
        example = false;
        description = "Whether a timer asks the server, and restarts it when it does not answer.";
      };

      interval = lib.mkOption {
        type = lib.types.str;
        default = "minutely";
        example = "*:0/5";
        description = "When to ask, as a calendar event of systemd.time(7).";
      };

      timeout = lib.mkOption {
        type = lib.types.ints.positive;
        default = 300;
        example = 60;
        description = ''
          Seconds until a server counts as hung. tinygrad's answers between two requests only: this
          has to be longer than the longest of them.
        '';
      };
    };
  };

  config = lib.mkIf cfg.enable {
    assertions = [
      {
        assertion = cfg.model != null;
        message = ''
          host ${host}: orin.llm-server.model is not set. Copy a GGUF to the board and name it, as in
          `orin.llm-server.model = "/var/lib/models/Llama-3.2-1B-Instruct-Q6_K.gguf"`.'';
      }
      {
        assertion = cfg.model == null || !lib.hasPrefix builtins.storeDir model;
        message = ''
          host ${host}: orin.llm-server.model is in the Nix store (${model}): each rebuild would copy
          gigabytes there, readable by everyone. Write it as a string that names a file outside, as in
          `orin.llm-server.model = "/var/lib/models/${baseNameOf model}"`.'';
      }
      {
        assertion = cfg.model == null || lib.hasPrefix "/" model;
        message = ''
          host ${host}: orin.llm-server.model = "${model}" is no absolute path. Write it from the root,
          as in "/var/lib/models/${baseNameOf model}".'';
      }
      {
        assertion = cfg.backend == "tinygrad" -> cfg.parallel == 1;
        message = ''
          host ${host}: orin.llm-server.parallel is ${toString cfg.parallel}, but tinygrad's server works on
          one request at a time. Set it to 1, or `orin.llm-server.backend = "llama-cpp"`.'';
      }
      (listening.reachable {
        inherit host cfg;
        what = "the server";
        at = "orin.llm-server";
        address = "host";
      })
    ];

    orin.board.required = lib.mkIf (cfg.device != "CPU") true;

    networking.firewall.allowedTCPPorts = lib.mkIf cfg.openFirewall [ cfg.port ];

    systemd.services.orin-llm-server = {
      description = "Language model server (${cfg.backend})";
      wantedBy = [ "multi-user.target" ];
      after = [
        "nvpmodel.service"
        "jetson_clocks.service"
      ];
      environment = {
        XDG_CACHE_HOME = "/var/cache/orin-llm-server";
        PYTHONUNBUFFERED = "1";
      }
      // lib.optionalAttrs (cfg.device != null) { DEV = cfg.device; }
      // cfg.environment;
      # Three failures within ten minutes and it stays down: a missing model does not come by itself.
      startLimitIntervalSec = 600;
      startLimitBurst = 3;
      serviceConfig =
        import ./hardening.nix {
          gpu = cfg.device != "CPU";
          jit = true;
        }
        // {
          Type = "exec";
          ExecStartPre = "${lib.getExe pkgs.python3} ${./check_model.py} ${lib.escapeShellArg model}";
          ExecStart = lib.escapeShellArgs (
            [ "${engine.package}/${lib.head engine.command}" ] ++ lib.tail engine.command ++ cfg.extraFlags
          );
          # Started means answering.
          ExecStartPost = "${curl} --max-time 5 --retry ${toString cfg.startTimeout} --retry-delay 1 --retry-connrefused ${engineUrl}${engine.healthPath}";
          TimeoutStartSec = cfg.startTimeout;
          # A server that hangs does not hear SIGTERM either.
          TimeoutStopSec = 15;
          Restart = "on-failure";
          RestartSec = 5;
          DynamicUser = true;
          CacheDirectory = "orin-llm-server";
          # The file alone, wherever it lies: its folders need not be open to the server.
          BindReadOnlyPaths = "-${model}";
          ProtectHome = "tmpfs";
          PrivateNetwork = true;
          RestrictAddressFamilies = [
            "AF_INET"
            "AF_UNIX"
          ];
        };
    };

    # It comes and goes with the server: while there is none, the port is shut.
    systemd.sockets.orin-llm-server-proxy = ofServer // {
      description = "Address of the language model server";
      wantedBy = [ "orin-llm-server.service" ];
      # Sockets come before basic.target by default, and the server after it.
      unitConfig.DefaultDependencies = false;
      conflicts = [ "shutdown.target" ];
      before = [ "shutdown.target" ];
      listenStreams = [ entrance ];
    };

    systemd.services.orin-llm-server-proxy = ofServer // {
      description = "The way into the language model server's own network";
      unitConfig.JoinsNamespaceOf = "orin-llm-server.service";
      serviceConfig = import ./hardening.nix { } // {
        Type = "notify";
        ExecStart = "${config.systemd.package}/lib/systemd/systemd-socket-proxyd 127.0.0.1:${toString enginePort}";
        DynamicUser = true;
        PrivateNetwork = true;
        RestrictAddressFamilies = [
          "AF_INET"
          "AF_INET6"
          "AF_UNIX"
        ];
      };
    };

    systemd.services.orin-llm-server-metrics = lib.mkIf cfg.metrics.enable (
      ofServer
      // {
        description = "Counts the language model server's requests and tokens";
        wantedBy = [ "orin-llm-server.service" ];
        serviceConfig = import ./hardening.nix { } // {
          ExecStart = lib.escapeShellArgs [
            (lib.getExe' pkgs.tinygrad-orin.python "python3")
            "-m"
            "exporter.llm"
            "--upstream"
            "http://${entrance}"
            "--listen"
            address
            "--metrics"
            "127.0.0.1:${toString cfg.metrics.port}"
            "--parallel"
            (toString cfg.parallel)
          ];
          Restart = "on-failure";
          DynamicUser = true;
          RestrictAddressFamilies = [
            "AF_INET"
            "AF_INET6"
            "AF_UNIX"
          ];
        };
      }
    );

    systemd.timers.orin-llm-server-health = lib.mkIf cfg.healthCheck.enable {
      description = "Ask the language model server";
      wantedBy = [ "timers.target" ];
      timerConfig.OnCalendar = cfg.healthCheck.interval;
    };

    systemd.services.orin-llm-server-health = lib.mkIf cfg.healthCheck.enable {
      description = "The language model server answers";
      # Nothing to ask while it is loading or down for good.
      after = [ "orin-llm-server.service" ];
      requisite = [ "orin-llm-server.service" ];
      onFailure = [ "orin-llm-server-restart.service" ];
      serviceConfig = import ./hardening.nix { } // {
        Type = "oneshot";
        ExecStart = "${curl} --max-time ${toString cfg.healthCheck.timeout} http://${reachable}:${toString cfg.port}${engine.healthPath}";
        TimeoutStartSec = cfg.healthCheck.timeout + 10;
        DynamicUser = true;
        RestrictAddressFamilies = [
          "AF_INET"
          "AF_INET6"
          "AF_UNIX"
        ];
        IPAddressDeny = lib.mkIf (reachable == "localhost" || cfg.host == "127.0.0.1") "any";
        IPAddressAllow = lib.mkIf (reachable == "localhost" || cfg.host == "127.0.0.1") "localhost";
      };
    };

    systemd.services.orin-llm-server-restart = lib.mkIf cfg.healthCheck.enable {
      description = "Restart a language model server that hangs";
      serviceConfig = {
        Type = "oneshot";
        # try-: a server that is down has its own reasons in its own log.
        ExecStart = "${config.systemd.package}/bin/systemctl try-restart orin-llm-server.service";
      };
    };
  };
}
