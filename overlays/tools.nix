# The four programs of the distribution on a Python that sees it: orinbench starts a worker process
# per device with `sys.executable`, and nvgpusim any `python3` that it is told.
{ runCommand, python3 }:

let
  python = python3.withPackages (packages: [ packages.tinygrad-orin ]);
  package = python3.pkgs.tinygrad-orin;
in
runCommand "${package.pname}-${package.version}"
  {
    inherit (package) version;
    inherit (package) pname;
    passthru = { inherit python package; };
    meta = package.meta // {
      mainProgram = "orinbench";
    };
  }
  ''
    mkdir -p $out/bin
    for program in orinllm orinbench jetson-exporter nvgpusim; do
      ln -s ${python}/bin/$program $out/bin/
    done
  ''
