# The packages of `nix build .#NAME`.
{ self, pkgs }:
let
  inherit (pkgs.python3Packages) tinygrad;
in
{
  default = pkgs.tinygrad-orin;
  inherit (pkgs) tinygrad-orin;
  inherit tinygrad;
  tinygrad-source = tinygrad.source;
  llama-cpp = pkgs.llama-cpp-orin;

  # The kernels of the benchmark's models for an AGX Orin; of others, see overlays/cubins.nix.
  cubins-1b = pkgs.orinllm-cubins.ofShape {
    shape = "1b";
    quant = "Q6_K";
  };
  cubins-8b = pkgs.orinllm-cubins.ofShape {
    shape = "8b";
    quant = "Q4_K_M";
  };

  # Every option of our modules, as Markdown.
  options = self.legacyPackages.${pkgs.stdenv.hostPlatform.system}.optionsDoc.optionsCommonMark;

  # A GPU inside a Nix build: for a board with `orin.tinygrad.gpuBuilds`, refused elsewhere. No
  # check, because `nix flake check` would fail on every machine without the board.
  gpu-check = tinygrad.gpuCheck;
}
