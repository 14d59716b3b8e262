# One address in front of several boards' language model servers: LiteLLM, which nixpkgs has. It knows
# which boards answer, sends a request to the one with the fewest under way, and to another one when a
# board fails before its first token.
{
  config,
  lib,
  ...
}:
let
  cfg = config.orin.llm-gateway;
  inherit (import ./common.nix { inherit lib config; })
    check
    listening
    option
    paths
    ;

  # One entry for each model of each board; those of one name are one group to choose from.
  entries = lib.concatLists (
    lib.mapAttrsToList (
      board: server:
      map (model: {
        model_name = model;
        litellm_params = {
          model = "openai/${model}";
          api_base = "${lib.removeSuffix "/" server.url}/v1";
          # LiteLLM wants some key; a server that asks for none ignores it.
          api_key = if server.keyVariable == null then "none" else "os.environ/${server.keyVariable}";
          inherit (cfg) timeout;
          stream_timeout = cfg.firstTokenTimeout;
          # The OpenAI client below LiteLLM would try the same board again.
          max_retries = 0;
        };
        model_info.id = "${board}/${model}";
      }) server.models
    ) cfg.servers
  );
  names = lib.attrNames cfg.servers;
in
{
  imports = [ ./ports.nix ];

  options.orin.llm-gateway = {
    enable = lib.mkEnableOption "a gateway in front of several boards' language model servers";

    servers = lib.mkOption {
      type = lib.types.attrsOf (
        lib.types.submodule {
          options = {
            url = lib.mkOption {
              type = lib.types.str;
              example = "http://orin-1:8000";
              description = "Where the server is, without `/v1`.";
            };
            models = lib.mkOption {
              type = lib.types.listOf lib.types.str;
              example = [ "small" ];
              description = ''
                The models that it has, by the names in its `orin.llm-server.models`. Boards with a model of
                the same name share its requests.
              '';
            };
            keyVariable = lib.mkOption {
              type = lib.types.nullOr (lib.types.strMatching "[A-Z][A-Z0-9_]*");
              default = null;
              example = "ORIN_1_KEY";
              description = "The variable of `environmentFile` with the key that this server wants.";
            };
          };
        }
      );
      default = { };
      example = lib.literalExpression ''
        {
          orin-1 = { url = "http://orin-1:8000"; models = [ "small" ]; keyVariable = "ORIN_KEY"; };
          orin-2 = { url = "http://orin-2:8000"; models = [ "small" ]; keyVariable = "ORIN_KEY"; };
        }
      '';
      description = "The servers behind the gateway, by a name for each.";
    };

    environmentFile = option (lib.types.nullOr lib.types.str) null "/var/lib/secrets/llm-gateway" ''
      A file on this machine with lines `NAME=VALUE`: `LITELLM_MASTER_KEY`, the key (`sk-...`) that
      clients show, and the variables that the servers' `keyVariable` name. Root's alone will do.
    '';

    host = listening.listenAddress "The address to listen on.";

    port = listening.port 4000 4001 "The port to listen on.";

    openFirewall = listening.openFirewall "the gateway's port";

    retries = option lib.types.ints.unsigned 2 4 ''
      How often a request that has not had its first token is tried again, on another board if there
      is one. An answer that has begun is never repeated: its client is told that it broke.
    '';

    timeout = option lib.types.ints.positive 600 120 "Seconds until a whole answer must be there.";

    firstTokenTimeout =
      option lib.types.ints.positive 120 30
        "Seconds until a streamed answer must begin.";

    restAfterFailure =
      option lib.types.ints.positive 15 60
        "Seconds that a board which failed gets no request.";

    healthInterval =
      option lib.types.ints.positive 60 300
        "Seconds between two checks of every board, each a request of one token.";
  };

  config = lib.mkIf cfg.enable {
    assertions =
      listening.rules "the gateway" "orin.llm-gateway" "host" cfg
      ++ [
        (check.demand (entries != [ ]) ''
          orin.llm-gateway.servers names no model. Set it as in
          `orin.llm-gateway.servers.orin-1 = { url = "http://orin-1:8000"; models = [ "small" ]; }`.'')
        (check.demand (cfg.environmentFile != null) ''
          orin.llm-gateway.environmentFile is not set, and LiteLLM starts with a key alone. Set it
          to a file on this machine with a line `LITELLM_MASTER_KEY=sk-...`.'')
        (paths.secret "orin.llm-gateway.environmentFile" cfg.environmentFile "/var/lib/secrets/llm-gateway")
        (check.rule "orin.llm-gateway.firstTokenTimeout" cfg.firstTokenTimeout (
          cfg.firstTokenTimeout <= cfg.timeout
        ) "the whole answer has `timeout` = ${toString cfg.timeout} seconds; write no more than that")
      ]
      ++ lib.concatMap (
        name:
        let
          server = cfg.servers.${name};
          at = "orin.llm-gateway.servers.${name}";
        in
        [
          (check.rule "${at}.models" server.models (
            server.models != [ ] || entries == [ ]
          ) ''no request would go to this server; name its models, as in [ "small" ], or leave it out'')
          (check.rule "${at}.models" server.models (lib.all (check.matches "[^[:space:]]+") server.models)
            "a name here is empty or holds a space, which no server has; write it as that server's `orin.llm-server.models` does"
          )
          (check.rule "${at}.keyVariable" server.keyVariable (server.keyVariable != "LITELLM_MASTER_KEY")
            "this is the gateway's own key, which the board would see; give the board's key a line of its own"
          )
          (check.rule "${at}.models" server.models (lib.allUnique server.models)
            "one of these is here twice and would get twice the requests; name each once"
          )
          (check.rule "${at}.url" server.url (
            !check.matches "https?://(127\\..*|localhost|\\[::1]|${config.networking.hostName}(\\.local)?):${toString cfg.port}/?" server.url
          ) "this is the gateway itself, which would ask itself for ever; write a server's address")
          (check.noPassword "${at}.url" server.url "use `keyVariable` and `environmentFile`")
          (check.demand (check.matches "https?://[^/[:space:]]+/?" server.url) ''
            ${at}.url = "${server.url}" is no address of a server. Write
            scheme, host and port alone, as in "http://${name}:8000".'')
          (check.rule "${at}.url" server.url
            (
              lib.count (
                other: lib.removeSuffix "/" cfg.servers.${other}.url == lib.removeSuffix "/" server.url
              ) names == 1
            )
            "another entry has this address too, and it would get twice the requests; write one entry with all its models"
          )
        ]
      ) names;

    orin.ports."orin.llm-gateway.port" = cfg.port;

    services.litellm = {
      enable = true;
      inherit (cfg)
        host
        port
        openFirewall
        environmentFile
        ;
      environment = {
        SCARF_NO_ANALYTICS = "True";
        DO_NOT_TRACK = "True";
        ANONYMIZED_TELEMETRY = "False";
        # Prices of models elsewhere, which it would fetch at each start.
        LITELLM_LOCAL_MODEL_COST_MAP = "True";
      };
      settings = {
        model_list = entries;
        router_settings = {
          routing_strategy = "least-busy";
          num_retries = cfg.retries;
          # One failure and a board rests; the next request goes elsewhere.
          allowed_fails = 0;
          cooldown_time = cfg.restAfterFailure;
        };
        litellm_settings = {
          callbacks = [ "prometheus" ];
          # /metrics is behind the key otherwise, and Prometheus of this machine reads it.
          require_auth_for_metrics_endpoint = false;
        };
        general_settings = {
          background_health_checks = true;
          health_check_interval = cfg.healthInterval;
          master_key = "os.environ/LITELLM_MASTER_KEY";
        };
      };
    };
  };
}
