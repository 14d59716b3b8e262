# This repository's Python distribution: orinllm, orinbench, orinboard, orinexporter and nvgpusim.
{
  lib,
  buildPythonPackage,
  prometheus,
  prometheus-node-exporter,
  python,
  runCommand,
  setuptools,
  tinygrad,
  # The finished package, for passthru.
  tinygrad-orin,
}:

let
  pyproject = lib.importTOML ../pyproject.toml;
  # A requirement's package, as nixpkgs writes its name: "prometheus_client>=0.21".
  packageOf =
    requirement:
    let
      name = lib.head (builtins.match "([A-Za-z0-9_-]+).*" requirement);
    in
    python.pkgs.${lib.replaceStrings [ "_" ] [ "-" ] (lib.toLower name)};
in
buildPythonPackage {
  pname = pyproject.project.name;
  inherit (pyproject.project) version;
  pyproject = true;

  src = lib.fileset.toSource {
    root = ../.;
    fileset = lib.fileset.unions [
      ../LICENSE
      ../README.md
      ../pyproject.toml
      ../benchmarks
      ../engine
      ../simulator
      ../telemetry
    ];
  };

  build-system = [ setuptools ];
  dependencies = [
    tinygrad
  ]
  ++ map packageOf (pyproject.project.dependencies ++ pyproject.project.optional-dependencies.nvml);

  # They are `passthru.tests.pytest`, so that a changed test does not rebuild the tools.
  doCheck = false;
  pythonImportsCheck = [
    "orinexporter"
    "orinboard"
    "nvgpusim"
    "orinbench"
    "orinllm"
  ];

  passthru.tests.pytest =
    let
      environment = python.withPackages (packages: [
        packages.hypothesis
        packages.pytest
        tinygrad-orin
      ]);
      # The tests look for rules, dashboards and docs beside the sources that they test. Those of the other
      # rooms need NVIDIA's compilers and a clang, of wheels: they run outside of Nix.
      checkout = lib.fileset.toSource {
        root = ../.;
        fileset = lib.fileset.unions [
          ../pyproject.toml
          ../benchmarks
          ../docs
          ../engine
          ../simulator
          ../telemetry
          ../tests/telemetry
        ];
      };
      tools = [
        environment
        prometheus
        prometheus.cli
        prometheus-node-exporter
      ];
    in
    runCommand "tinygrad-orin-pytest" { nativeBuildInputs = tools; } ''
      cp -r ${checkout} checkout && chmod -R u+w checkout && cd checkout
      export HOME=$TMPDIR
      export PYTHONPATH=$PWD/benchmarks:$PWD/engine:$PWD/simulator:$PWD/telemetry
      python3 -m pytest -p no:cacheprovider
      touch $out
    '';

  meta = {
    inherit (pyproject.project) description;
    license = lib.licenses.mit;
    # Of nixpkgs' list: none looks after this repository, whose address is its owner's.
    maintainers = [ ];
    platforms = [
      "aarch64-linux"
      "x86_64-linux"
    ];
  };
}
