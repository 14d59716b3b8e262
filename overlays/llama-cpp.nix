# llama.cpp as `orinbench llama-bench` compares against it: for the Orin's GPU on aarch64 (config
# says sm_87), for the CPU elsewhere.
{
  lib,
  stdenv,
  llama-cpp,
}:

(llama-cpp.override { cudaSupport = stdenv.hostPlatform.isAarch64; }).overrideAttrs (old: {
  doInstallCheck = true;
  # The benchmark is what we are here for; upstream builds it only with its examples.
  installCheckPhase = ''
    runHook preInstallCheck
    test -x $out/bin/llama-bench
    test -x $out/bin/llama-server
    runHook postInstallCheck
  '';
  meta = old.meta // {
    mainProgram = "llama-bench";
    platforms = lib.platforms.linux;
  };
})
