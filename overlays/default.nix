# All that this project changes in nixpkgs. `jetpack-nixos.overlays.default` comes before it.
final: prev: {
  # JetPack 6 is CUDA 12.6. jetpack-nixos alone picks 11.4, its NixOS module 12.9.
  cudaPackages = final.cudaPackages_12_6;

  pythonPackagesExtensions = prev.pythonPackagesExtensions ++ [
    (
      pyFinal: pyPrev:
      {
        tinygrad = pyFinal.callPackage ./tinygrad.nix { };
        tinygrad-orin = pyFinal.callPackage ./tinygrad-orin.nix { };
      }
      # Its tests want torch, which wants NCCL where CUDA is on, which a Jetson has not.
      // final.lib.optionalAttrs (final.config.cudaSupport or false) {
        llguidance = pyPrev.llguidance.overridePythonAttrs { doCheck = false; };
      }
    )
  ];

  llama-cpp-orin = final.callPackage ./llama-cpp.nix { inherit (prev) llama-cpp; };
  tinygrad-orin = final.callPackage ./tools.nix { };
  orinllm-cubins = import ./cubins.nix { inherit (final) lib runCommand tinygrad-orin; };
}
