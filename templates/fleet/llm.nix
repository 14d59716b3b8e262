{
  orin.llm-server = {
    enable = true;
    models.main.file = "/var/lib/models/model.gguf";
  };
}
