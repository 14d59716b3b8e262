# This repository's Python distribution: orinbench, jetson, exporter and nvgpusim.
{
  lib,
  buildPythonPackage,
  python,
  runCommand,
  setuptools,
  click,
  gguf,
  jinja2,
  matplotlib,
  numpy,
  nvidia-ml-py,
  prometheus-client,
  rich,
  tinygrad,
  # The finished package, for passthru.
  tinygrad-orin,
}:

let
  pyproject = lib.importTOML ../pyproject.toml;
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
      ../simulator
      ../telemetry
    ];
  };

  build-system = [ setuptools ];
  dependencies = [
    click
    gguf
    jinja2
    matplotlib
    numpy
    nvidia-ml-py
    prometheus-client
    rich
    tinygrad
  ];

  # They are `passthru.tests.pytest`, so that a changed test does not rebuild the tools.
  doCheck = false;
  pythonImportsCheck = [
    "exporter"
    "jetson"
    "nvgpusim"
    "orinbench"
  ];

  passthru.tests.pytest =
    let
      environment = python.withPackages (packages: [
        packages.hypothesis
        packages.pytest
        tinygrad-orin
      ]);
      tests = lib.fileset.toSource {
        root = ../.;
        fileset = lib.fileset.unions [
          ../pyproject.toml
          ../telemetry/dashboards
          ../telemetry/rules
          ../tests/benchmarks
          ../tests/telemetry
        ];
      };
    in
    runCommand "tinygrad-orin-pytest" { nativeBuildInputs = [ environment ]; } ''
      cp -r ${tests} tests && chmod -R u+w tests && cd tests
      export HOME=$TMPDIR
      python3 -m pytest -m "not gpu and not slow" -p no:cacheprovider
      touch $out
    '';

  meta = {
    inherit (pyproject.project) description;
    license = lib.licenses.mit;
    platforms = [
      "aarch64-linux"
      "x86_64-linux"
    ];
  };
}
