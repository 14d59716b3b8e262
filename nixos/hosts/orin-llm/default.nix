# `orin` with a language model server on the loopback.
{
  imports = [ ../orin ];

  orin.llm-server = {
    enable = true;
    models.main.file = "/var/lib/models/model.gguf";
  };
}
