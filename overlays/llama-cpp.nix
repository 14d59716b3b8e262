# llama.cpp as `orinbench llama-bench` compares against it: nixpkgs' expression, for the Orin's GPU on
# aarch64 (config says sm_87), for the CPU elsewhere. Its OpenCL, ROCm and Vulkan stay off, as nixpkgs has
# them: JetPack has no OpenCL driver, ROCm is AMD's, and Vulkan is no backend that we compare with.
{
  lib,
  stdenv,
  llama-cpp,
  cudaSupport ? stdenv.hostPlatform.isAarch64,
}:

(llama-cpp.override { inherit cudaSupport; }).overrideAttrs (old: {
  doInstallCheck = true;
  # The benchmark is what we are here for; upstream builds it only with its examples.
  installCheckPhase = ''
    runHook preInstallCheck
    test -x $out/bin/llama-bench
    test -x $out/bin/llama-server
    runHook postInstallCheck
  '';
  meta = old.meta // {
    changelog = "https://github.com/ggml-org/llama.cpp/releases/tag/b${old.version or ""}";
    mainProgram = "llama-bench";
    platforms = lib.platforms.linux;
  };
})
