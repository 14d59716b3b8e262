# What the module refuses: its assertions.
{
  config,
  lib,
  secrets,
}:
let
  cfg = config.orin.llm-server;
  inherit (import ../common { inherit lib config; }) check listening paths;
  loopback = listening.isLoopback cfg.host;
  # Flags that options set; a second one would win over them in silence.
  ours = lib.splitString " " (
    "--alias --api-key-file --context --ctx-size --device --draft --grace --host --insecure --memory --mmproj --model "
    + "--model-draft --n-gpu-layers --parallel --port --queue --slots -a -c -m -md -ngl -np"
  );
  files =
    name: model:
    lib.concatLists (
      lib.mapAttrsToList
        (
          what: example:
          let
            option = "orin.llm-server.models.${name}.${what}";
            # No file, but a block of the model's own.
            given = if what == "draftModel" && model.draftModel == "mtp" then null else model.${what};
          in
          [
            (check.rule option given (
              given == null || !check.matches "[a-z0-9]+://.*" given
            ) ''the server downloads nothing; write a file of the board, as in "${example}"'')
            (check.rule option given (
              given == null || !check.matches ".*\\.(bin|pt|pth|safetensors)" given
            ) "the engines read GGUF alone; convert it with llama.cpp's convert_hf_to_gguf.py")
            (paths.file option given "where each rebuild would copy gigabytes to" example)
          ]
        )
        {
          file = "/var/lib/models/${
            if lib.hasSuffix ".gguf" model.file then
              lib.strings.sanitizeDerivationName (baseNameOf model.file)
            else
              "model.gguf"
          }";
          draftModel = "/var/lib/models/draft.gguf";
          mmproj = "/var/lib/models/mmproj.gguf";
        }
    );
in
[
  (check.demand (cfg.models != { }) ''
    orin.llm-server.models is empty. Copy a GGUF to the board and name it, as in
      `orin.llm-server.models.main.file = "/var/lib/models/Llama-3.2-1B-Instruct-Q6_K.gguf"`.'')
  (check.demand (loopback || cfg.apiKeyFile != null || cfg.insecure) ''
    orin.llm-server.host = "${cfg.host}" answers everyone who reaches it. Set
      `orin.llm-server.apiKeyFile` to a file with keys, or `orin.llm-server.insecure = true`.'')
  (check.demand (cfg.apiKeyFile == null || !cfg.insecure) ''
    orin.llm-server.insecure is true, and apiKeyFile = "${toString cfg.apiKeyFile}" asks
      for keys. Leave one of them out.'')
  (check.demand (cfg.metrics && cfg.apiKeyFile != null -> cfg.metricsKeyFile != null) ''
    orin.llm-server.metricsKeyFile is not set, and the servers ask for a key on /metrics
      too. Set it to a file with one of the keys, or `orin.llm-server.metrics = false`.'')
]
++ listening.rules "the server" "orin.llm-server" "host" cfg
++ secrets.assertions
++ [
  (check.rule "orin.llm-server.metricsKeyFile" cfg.metricsKeyFile
    (cfg.metricsKeyFile == null || cfg.metricsKeyFile != cfg.apiKeyFile)
    "this is `apiKeyFile` too, and Prometheus shows a whole file as one key; write one of its keys into a file of its own"
  )
  (check.rule "orin.llm-server.watchdog" cfg.watchdog (
    cfg.watchdog >= 5
  ) "a step over a long prompt takes seconds, and systemd would kill it; write 5 or more, as in 60")
]
# The default is another option's, which has its own rule.
++ lib.optional (cfg.device != (config.orin.tinygrad.device or null)) (
  check.device "orin.llm-server.device" cfg.device
)
++ check.variables "orin.llm-server.environment" cfg.environment
++ lib.concatLists (
  lib.mapAttrsToList (name: model: [
    (check.unprivileged "orin.llm-server.models.${name}.port" model.port)
    (check.rule "orin.llm-server.models.${name}.memory" model.memory (
      model.memory == null || check.matches "([1-9][0-9]?|100)%" model.memory
    ) ''write a share of the free memory, 1% to 100%, without a space, as in "40%"'')
    (check.rule "orin.llm-server.models.${name}.extraFlags" model.extraFlags (lib.all
      (flag: !lib.elem (lib.head (lib.splitString "=" flag)) ours)
      model.extraFlags
    ) "an option sets one of these flags; leave it out and set the option, as in `port` for --port")
    (check.flags "orin.llm-server.models.${name}.extraFlags" model.extraFlags)
    (check.demand (builtins.match "[a-z0-9][a-z0-9_-]{0,62}" name != null) ''
      orin.llm-server.models."${name}": the name becomes part of a unit's: lower-case letters,
        digits, - and _, 63 at most, as in `orin.llm-server.models.main`.'')
    (check.rule "orin.llm-server.models.${name}.draftModel" model.draftModel (
      model.draftModel != model.file
    ) "this is `file` too, and guesses of the same model save nothing; name a smaller one, or null")
    (check.rule "orin.llm-server.models.${name}.mmproj" model.mmproj (
      model.mmproj == null || model.mmproj != model.file && model.mmproj != model.draftModel
    ) "this is `file` or `draftModel` too; name the mmproj file of the same model, or null")
    (check.rule "orin.llm-server.models.${name}.draftModel" model.draftModel (
      cfg.backend == "llama-cpp" -> model.draftModel != "mtp"
    ) ''llama.cpp takes a file here; name one, or set `orin.llm-server.backend = "orinllm"`'')
    (check.demand (cfg.backend == "llama-cpp" -> model.memory == null && model.queue == null) ''
      orin.llm-server.models.${name}: llama.cpp has no `memory` and no `queue`. Set `context`
        and `slots`, or `orin.llm-server.backend = "orinllm"`.'')
  ]) cfg.models
)
++ lib.concatLists (lib.mapAttrsToList files cfg.models)
