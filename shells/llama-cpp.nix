# llama.cpp: its programs, and what building a checkout of it takes: `cmake -B build $cmakeFlags`
# configures it as the package is, for sm_87 on a Jetson.
{ pkgs }:
let
  inherit (pkgs) llama-cpp-orin;
in
pkgs.mkShell.override { inherit (llama-cpp-orin) stdenv; } {
  name = "llama-cpp";
  inputsFrom = [ llama-cpp-orin ];
  packages = [
    llama-cpp-orin
    pkgs.ccache
    pkgs.git
  ];
  inherit (llama-cpp-orin) cmakeFlags;
}
