# tinygrad with the patch series. An expression of our own instead of an override: it is the same
# on every nixpkgs, and `.override` stays.
{
  lib,
  stdenv,
  buildPythonPackage,
  fetchPypi,
  python,
  runCommand,
  applyPatches,
  addDriverRunpath,
  cudaPackages,
  llvmPackages,
  callPackage,
  setuptools,

  # Of nixpkgs' own tinygrad, whose extras these have.
  optional-dependencies,
  # The finished package, for passthru.
  tinygrad,
  # Compile for CUDA: NVRTC, nvJitLink and the headers, none of which needs a GPU. nixpkgs' expression has
  # OpenCL and ROCm too: JetPack has no OpenCL driver, and an Orin no AMD GPU.
  cudaSupport ? true,
}:

let
  series = import ./series.nix;
  inherit (series) base;
  libOf = package: "${lib.getLib package}/lib";

  # tinygrad looks for shared libraries in /usr and LD_LIBRARY_PATH only. Here a store path goes in
  # front of each search, which itself stays: `nix develop` works on other distributions too.
  postPatch = ''
    substituteInPlace pyproject.toml \
      --replace-fail 'version = "${base.version}"' 'version = "${series.version}"'
    substituteInPlace tinygrad/runtime/autogen/libc.py \
      --replace-fail "'libc', 'c'" "'libc', '${libOf stdenv.cc.libc}/libc.so.6'"
    substituteInPlace tinygrad/runtime/autogen/llvm.py \
      --replace-fail "else ['LLVM'," "else ['${libOf llvmPackages.llvm}/libLLVM.so', 'LLVM',"
    substituteInPlace tinygrad/runtime/autogen/libclang.py \
      --replace-fail "else ['clang'," "else ['${libOf llvmPackages.libclang}/libclang.so', 'clang',"
    substituteInPlace tinygrad/runtime/support/system.py \
      --replace-fail "'libatomic', 'atomic'" "'libatomic', ['${libOf stdenv.cc.cc}/libatomic.so.1', 'atomic']"
  ''
  # Unwrapped, or -march=native is dropped; and not $CC, which is gcc in every Nix shell.
  + ''
    substituteInPlace tinygrad/runtime/support/compiler_cpu.py \
      --replace-fail "getenv(\"CC\", 'clang')" "'${lib.getExe llvmPackages.clang-unwrapped}'"
  ''
  + lib.optionalString cudaSupport ''
    substituteInPlace tinygrad/runtime/autogen/cuda.py \
      --replace-fail "'cuda', 'cuda'" "'cuda', ['${addDriverRunpath.driverLink}/lib/libcuda.so', 'cuda']"
    substituteInPlace tinygrad/runtime/autogen/nvrtc.py \
      --replace-fail "'nvrtc', 'nvrtc'," "'nvrtc', ['${libOf cudaPackages.cuda_nvrtc}/libnvrtc.so', 'nvrtc'],"
    substituteInPlace tinygrad/runtime/autogen/nvjitlink.py \
      --replace-fail "'nvjitlink', 'nvJitLink'," "'nvjitlink', ['${libOf cudaPackages.libnvjitlink}/libnvJitLink.so', 'nvJitLink'],"
    substituteInPlace tinygrad/runtime/support/compiler_cuda.py \
      --replace-fail '"CUDA_INCLUDE_PATH", ""' '"CUDA_INCLUDE_PATH", "${lib.getInclude cudaPackages.cuda_cudart}/include"'
  '';

  # Run a Python program with the finished package and nothing else.
  check =
    name: program:
    runCommand "tinygrad-${name}" { nativeBuildInputs = [ (python.withPackages (_: [ tinygrad ])) ]; }
      ''
        export HOME=$TMPDIR
        python3 ${program}
        touch $out
      '';
in
buildPythonPackage {
  pname = base.name;
  inherit (series) version patches;
  pyproject = true;

  src = fetchPypi {
    pname = base.name;
    inherit (base) version sha256;
  };

  # The context must match to the line: a hunk that has drifted may have drifted elsewhere.
  patchFlags = [
    "-p1"
    "--fuzz=0"
  ];
  inherit postPatch;

  build-system = [ setuptools ];

  # As nixpkgs' expression has them: upstream's others, linting and docs, are for working on tinygrad itself.
  inherit optional-dependencies;

  # The sdist has one test file, without the helpers that it imports: `passthru.tests.upstream` runs those of
  # the tag. The series' own tests are `tools/series verify`.
  doCheck = false;
  pythonImportsCheck = [
    "tinygrad"
    "tinygrad.llm.model"
    "tinygrad.runtime.ops_cpu"
    "tinygrad.runtime.ops_nv"
  ]
  ++ lib.optional cudaSupport "tinygrad.runtime.ops_cuda";

  # A patch that adds a folder or a file must name it in pyproject.toml, or it is left behind here.
  postInstall = ''
    files() { (cd "$1" && find . -type f -not -name '*.pyc' | sort); }
    diff <(files tinygrad) <(files $out/${python.sitePackages}/tinygrad)
  '';

  passthru = {
    inherit series;
    # The tree that is built: patched, library paths set.
    source = applyPatches {
      name = "tinygrad-${series.version}-source";
      inherit (tinygrad) src patches;
      patchFlags = "-p1 --fuzz=0";
      inherit postPatch;
    };
    tests = {
      cpu = check "cpu" ./checks/cpu.py;
      upstream = callPackage ./upstream-tests.nix { };
    }
    // lib.optionalAttrs cudaSupport {
      sm87 = check "sm87" ./checks/cuda_compilers.py;
    };
    # Patched tinygrad on the GPU, inside a Nix build: `orin.tinygrad.gpuBuilds` lets a board do it.
    gpuCheck = (check "gpu" ./checks/gpu.py).overrideAttrs {
      requiredSystemFeatures = [ "tegra-gpu" ];
    };
  };

  meta = {
    description = "Deep learning framework with the Jetson Orin patch series";
    homepage = "https://github.com/tinygrad/tinygrad";
    changelog = "https://github.com/tinygrad/tinygrad/releases/tag/v${base.version}";
    license = lib.licenses.mit;
    # Of nixpkgs' list: none looks after this series.
    maintainers = [ ];
    platforms = [
      "aarch64-linux"
      "x86_64-linux"
    ];
  };
}
