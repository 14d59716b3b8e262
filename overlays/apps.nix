# `nix run .#NAME`: one entry per command that exists.
{ self, pkgs }:
let
  inherit (pkgs) lib;

  app = description: package: {
    type = "app";
    program = lib.getExe package;
    meta = { inherit description; };
  };

  # The revision goes into each result that orinbench writes.
  revision = self.rev or self.dirtyRev or "unknown";
  orinbench =
    { command, description }:
    app description (
      pkgs.writeShellApplication {
        name = command;
        runtimeInputs = [
          pkgs.tinygrad-orin
          pkgs.llama-cpp-orin
        ];
        runtimeEnv.ORINBENCH_FLAKE_REVISION = revision;
        text = ''exec orinbench ${command} "$@"'';
      }
    );
  program =
    { name, description }:
    app description (
      pkgs.writeShellApplication {
        inherit name;
        runtimeInputs = [ pkgs.tinygrad-orin ];
        text = ''exec ${name} "$@"'';
      }
    );

  series = pkgs.writeShellApplication {
    name = "series";
    runtimeInputs = [
      pkgs.git
      (pkgs.python3.withPackages (packages: [
        packages.pip
        packages.pytest
        packages.setuptools
      ]))
    ];
    # The patches are edited in a checkout: the tool must be that checkout's.
    text = ''
      root=$(git rev-parse --show-toplevel 2>/dev/null) || root=.
      if [ ! -x "$root/tools/series" ]; then
        echo "series: $PWD is not in a checkout of tinygrad-orin: clone it and run this inside" >&2
        exit 2
      fi
      exec python3 "$root/tools/series" "$@"
    '';
  };

  apps = {
    llama-bench = orinbench {
      command = "llama-bench";
      description = "Measure tinygrad and llama.cpp on one GGUF, interleaved in one run";
    };
    synth = orinbench {
      command = "synth";
      description = "Write a synthetic GGUF of a named shape";
    };
    nvgpusim = program {
      name = "nvgpusim";
      description = "Run a command on a simulated Orin GPU";
    };
    exporter = program {
      name = "jetson-exporter";
      description = "Serve the board's power, clocks and temperatures to Prometheus";
    };
    series = app "Check out, export, verify and install the tinygrad patch series" series;
  };
in
apps // { default = apps.llama-bench; }
