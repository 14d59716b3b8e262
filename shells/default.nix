# `nix develop .#NAME`. No C compiler in the shells that run tinygrad: it would set CC and its kin.
{ pkgs, ... }:
{
  default = import ./all.nix { inherit pkgs; };
  tinygrad = import ./tinygrad.nix { inherit pkgs; };
  llama-cpp = import ./llama-cpp.nix { inherit pkgs; };
}
