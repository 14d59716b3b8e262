# One address in front of the boards' servers: LiteLLM, which nixpkgs has. On the monitor, before the switch:
#   install -m 0400 gateway.env /var/lib/secrets/gateway.env
# with LITELLM_MASTER_KEY=sk-..., which clients show, and ORIN_KEY=..., a board's. Plain HTTP: trust the network.
let
  # One entry for each model of each board; those of one name share its requests.
  servedBy = board: {
    model_name = "main";
    litellm_params = {
      model = "openai/main";
      api_base = "http://${board}.local:8000/v1";
      api_key = "os.environ/ORIN_KEY";
      # Seconds: until a streamed answer begins, and until a whole one is there.
      stream_timeout = 120;
      timeout = 600;
      # The OpenAI client below LiteLLM would try the same board again.
      max_retries = 0;
    };
    model_info.id = "${board}/main";
  };
in
{
  services.litellm = {
    enable = true;
    host = "0.0.0.0";
    port = 4000;
    openFirewall = true;
    environmentFile = "/var/lib/secrets/gateway.env";
    # Whoever sets one of these sets all: no reports, and no prices of models elsewhere from the network.
    environment = {
      SCARF_NO_ANALYTICS = "True";
      DO_NOT_TRACK = "True";
      ANONYMIZED_TELEMETRY = "False";
      LITELLM_LOCAL_MODEL_COST_MAP = "True";
      DISABLE_ADMIN_UI = "True";
    };
    settings = {
      model_list = map servedBy [
        "orin-2"
        "orin-3"
      ];
      # To the board with the fewest under way, or another if it fails before its first token; it rests then.
      router_settings = {
        routing_strategy = "least-busy";
        num_retries = 2;
        allowed_fails = 0;
        cooldown_time = 15;
      };
      litellm_settings.callbacks = [ "prometheus" ];
      litellm_settings.require_auth_for_metrics_endpoint = true;
      general_settings = {
        background_health_checks = true;
        health_check_interval = 60;
        master_key = "os.environ/LITELLM_MASTER_KEY";
      };
    };
  };
}
