# `nix build .#NAME`.
{ pkgs, ... }:
let
  inherit (pkgs.python3Packages) tinygrad;
in
{
  default = pkgs.tinygrad-orin;
  inherit (pkgs) tinygrad-orin;
  inherit tinygrad;
  tinygrad-source = tinygrad.source;
  llama-cpp = pkgs.llama-cpp-orin;

  # A GPU inside a Nix build: for a board with `orin.tinygrad.gpuBuilds`, refused elsewhere. No
  # check, because `nix flake check` would fail on every machine without the board.
  gpu-check = tinygrad.gpuCheck;
}
