# `nix run .#NAME`: one entry per command that exists.
{ self, pkgs }:
let
  inherit (pkgs) lib tinygrad-orin;

  app =
    {
      name,
      description,
      text,
      runtimeInputs ? [ tinygrad-orin ],
    }:
    {
      type = "app";
      program = lib.getExe (
        pkgs.writeShellApplication {
          inherit name text runtimeInputs;
          # It goes into each result that orinbench writes.
          runtimeEnv.TINYGRAD_ORIN_REVISION = self.rev or self.dirtyRev or "unknown";
        }
      );
      meta = { inherit description; };
    };

  orinbench =
    name: description:
    app {
      inherit name description;
      text = ''exec orinbench ${name} "$@"'';
      runtimeInputs = [
        tinygrad-orin
        pkgs.llama-cpp-orin
      ];
    };

  # Language models, in a shell.
  orinllm =
    name: description:
    app {
      inherit name description;
      text = ''exec orinllm ${name} "$@"'';
    };

  # Tools that work on the checkout they are run in, not on the copy that Nix has of it.
  inCheckout =
    name: command:
    ''
      root=$(git rev-parse --show-toplevel 2>/dev/null) || root=.
      if [ ! -x "$root/tools/series" ]; then
        echo "${name}: $PWD is not in a checkout of tinygrad-orin: clone it and run this inside" >&2
        exit 2
      fi
    ''
    + command;

  apps = {
    chat = orinllm "chat" "Talk to a model of a GGUF file";
    serve = orinllm "serve" "Answer over HTTP as OpenAI's API does";
    run = orinllm "run" "Answer one prompt with a model of a GGUF file";
    show = orinllm "show" "Say what a model is, and which path each of its tensors takes";

    llama-bench = orinbench "llama-bench" "Measure tinygrad and llama.cpp on one GGUF, interleaved in one run";
    check = orinbench "check" "Compare tinygrad's and llama.cpp's tokens and logits with a reference";
    compare = orinbench "compare" "Say whether one result is faster than another, with confidence";
    history = orinbench "history" "Show how each benchmark went from run to run, and which changes are real";
    profile = orinbench "profile" "Say where the time of a token and of a prompt goes, kernel by kernel, or compiled for sm_87";
    report = orinbench "report" "Show results as one page, with plots and tables";
    synth = orinbench "synth" "Write a synthetic GGUF of a named shape";
    device-check = orinbench "device-check" "Take what only a real Orin can show: one report, within an hour";
    suite = orinbench "suite" "Run several benchmarks on all devices and write one report";

    nvgpusim = app {
      name = "nvgpusim";
      description = "Run a command on a simulated Orin GPU";
      text = ''exec nvgpusim "$@"'';
    };
    exporter = app {
      name = "exporter";
      description = "Serve the board's power, clocks and temperatures to Prometheus";
      text = ''exec jetson-exporter "$@"'';
    };
    telemetry-demo = app {
      name = "telemetry-demo";
      description = "Exporter and Prometheus over a made-up board, with our rules";
      text = ''
        data=$(mktemp -d)
        jetson-exporter --replay ${../telemetry/boards/agx-orin} &
        trap 'kill $!; rm -r "$data"' EXIT
        prometheus --config.file=${../telemetry}/prometheus.yml --storage.tsdb.path="$data" \
          --web.listen-address=127.0.0.1:9090 --log.level=warn
      '';
      runtimeInputs = [
        tinygrad-orin
        pkgs.prometheus
      ];
    };

    series = app {
      name = "series";
      description = "Check out, export, verify and install the tinygrad patch series";
      text = inCheckout "series" ''exec python3 "$root/tools/series" "$@"'';
      runtimeInputs = [
        pkgs.git
        (pkgs.python3.withPackages (packages: [
          packages.pip
          packages.pytest
          packages.setuptools
        ]))
      ];
    };
  };

  # NVIDIA's flashing tools are programs for x86_64.
  onDesk = lib.optionalAttrs pkgs.stdenv.hostPlatform.isx86_64 {
    flash = {
      type = "app";
      program = lib.getExe (self.lib.flashProgram pkgs);
      meta.description = "Flash a board's firmware, as flake.lock has it, over USB";
    };
  };
in
apps // onDesk // { default = apps.llama-bench; }
