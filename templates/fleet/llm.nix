# A board that answers the gateway: on the board, one key in each of these two files.
{
  orin.llm-server = {
    enable = true;
    host = "0.0.0.0";
    openFirewall = true;
    apiKeyFile = "/var/lib/secrets/llm-keys";
    metricsKeyFile = "/var/lib/secrets/llm-metrics-key";
    models.main.file = "/var/lib/models/model.gguf";
  };
}
