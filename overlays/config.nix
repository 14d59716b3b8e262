# The configuration of nixpkgs that the packages are built with, for one system.
{ system }:
{
  # CUDA and JetPack are unfree; the packages that pull them are the point of this flake.
  allowUnfree = true;
}
# An Orin is compute capability 8.7, and nixpkgs knows that one on aarch64 alone. Elsewhere
# llama.cpp stays the build for the CPU that the public cache has; tinygrad compiles for CUDA
# everywhere, because NVRTC needs no GPU.
// (
  if system == "aarch64-linux" then
    {
      cudaSupport = true;
      cudaCapabilities = [ "8.7" ];
    }
  else
    { }
)
