{
  orin.llm-server = {
    enable = true;
    model = "/var/lib/models/model.gguf";
  };
}
