# An AGX Orin devkit on JetPack 6 for benchmarks: full speed, read back, and watched.
{
  imports = [ ../orin-minimal ];

  orin = {
    performance.enable = true;
    telemetry.enable = true;
    tinygrad.gpuBuilds = true;
  };
}
