# All that this project changes in nixpkgs. `jetpack-nixos.overlays.default` comes before it.
final: prev: {
  # JetPack 6 is CUDA 12.6, JetPack 7 is 13.2: the module of jetpack-nixos picks 12.9 or 13, alone it picks 11.4.
  cudaPackages =
    if final.lib.versionAtLeast prev.cudaPackages.cudaMajorMinorVersion "13" then
      final.cudaPackages_13_2
    else
      final.cudaPackages_12_6;

  pythonPackagesExtensions = prev.pythonPackagesExtensions ++ [
    (
      pyFinal: pyPrev:
      {
        tinygrad = pyFinal.callPackage ./tinygrad.nix { inherit (pyPrev.tinygrad) optional-dependencies; };
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
