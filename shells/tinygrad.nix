# A checkout of the series to hack on: `tools/series checkout DIR`, edit commits in DIR, run
# `PYTHONPATH=DIR python3 ...`, then `tools/series export DIR`.
{ pkgs }:
let
  inherit (pkgs) lib cudaPackages llvmPackages;
  libOf = package: "${lib.getLib package}/lib";
in
pkgs.mkShellNoCC {
  name = "tinygrad-series";
  packages = [
    (pkgs.python3.withPackages (packages: [
      packages.gguf
      packages.hypothesis
      packages.mypy
      packages.numpy
      packages.pip
      packages.pytest
      packages.pytest-xdist
      packages.setuptools
      packages.tqdm
      packages.z3-solver
    ]))
    llvmPackages.clang-unwrapped
    pkgs.git
    pkgs.ruff
  ];

  # A checkout is upstream's code: it finds libraries by these variables, or not at all.
  env = {
    LIBC_PATH = "${libOf pkgs.stdenv.cc.libc}/libc.so.6";
    LLVM_PATH = "${libOf llvmPackages.llvm}/libLLVM.so";
    NVRTC_PATH = "${libOf cudaPackages.cuda_nvrtc}/libnvrtc.so";
    NVJITLINK_PATH = "${libOf cudaPackages.libnvjitlink}/libnvJitLink.so";
    CUDA_INCLUDE_PATH = "${lib.getInclude cudaPackages.cuda_cudart}/include";
    LD_LIBRARY_PATH = lib.concatStringsSep ":" [
      (libOf pkgs.stdenv.cc.cc)
      "${pkgs.addDriverRunpath.driverLink}/lib"
    ];
  };
}
