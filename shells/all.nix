# Patched tinygrad, llama.cpp, our tools, linters, and what the tests of telemetry and of the flake need.
{ pkgs }:
pkgs.mkShellNoCC {
  name = "tinygrad-orin";
  packages = [
    (pkgs.python3.withPackages (packages: [
      packages.coverage
      packages.hypothesis
      packages.mypy
      packages.pip
      packages.pytest
      packages.pytest-cov
      packages.pytest-xdist
      packages.setuptools
      packages.tinygrad-orin
    ]))
    pkgs.llama-cpp-orin
    pkgs.prometheus.cli
    pkgs.ruff
    pkgs.deadnix
    pkgs.git
    pkgs.nixfmt
    pkgs.shellcheck
    pkgs.statix
  ];
  # The checkout goes in front of the packaged copy: an edit counts at once.
  shellHook = ''
    if root=$(git rev-parse --show-toplevel 2>/dev/null || pwd) && [ -d "$root/benchmarks/orinbench" ]; then
      export PYTHONPATH="$root/benchmarks:$root/engine:$root/simulator:$root/telemetry''${PYTHONPATH:+:$PYTHONPATH}"
    fi
  '';
}
