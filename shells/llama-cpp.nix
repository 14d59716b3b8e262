# llama.cpp: its programs, and what building a checkout of it for the Orin takes.
{ pkgs }:
pkgs.mkShell {
  name = "llama-cpp";
  inputsFrom = [ pkgs.llama-cpp-orin ];
  packages = [
    pkgs.llama-cpp-orin
    pkgs.ccache
    pkgs.git
  ];
  # cmake -B build $cmakeFlags
  env.cmakeFlags = pkgs.lib.concatStringsSep " " (
    [
      "-GNinja"
      "-DCMAKE_BUILD_TYPE=Release"
    ]
    ++ pkgs.lib.optionals pkgs.stdenv.hostPlatform.isAarch64 [
      "-DGGML_CUDA=ON"
      "-DCMAKE_CUDA_ARCHITECTURES=87"
    ]
  );
}
