# The sandbox of our services, as in nixpkgs' exporters; each service adds its user and its network.
#
# gpu: the service opens the GPU. tinygrad and llama.cpp then need
#   - the device nodes (PrivateDevices and DevicePolicy=closed hide them: nvgpu registers a node per
#     channel under majors that are not fixed, so a list of allowed ones cannot be written),
#   - /proc/meminfo, which unified memory is sized by (ProcSubset=pid hides it),
#   - the groups of the nodes, which a user namespace would not map (PrivateUsers),
#   - to place their threads and memory (~@resources).
# jit: the service writes machine code into its memory, as tinygrad's CPU device does.
{
  gpu ? false,
  jit ? gpu,
}:
{
  AmbientCapabilities = "";
  CapabilityBoundingSet = "";
  LockPersonality = true;
  MemoryDenyWriteExecute = !jit;
  NoNewPrivileges = true;
  PrivateDevices = !gpu;
  PrivateMounts = true;
  PrivateTmp = true;
  PrivateUsers = !gpu;
  ProcSubset = "all";
  ProtectClock = !gpu; # it implies a DeviceAllow list
  ProtectControlGroups = true;
  ProtectHome = true;
  ProtectHostname = true;
  ProtectKernelLogs = true;
  ProtectKernelModules = true;
  ProtectKernelTunables = true;
  ProtectProc = "invisible";
  ProtectSystem = "strict";
  RemoveIPC = true;
  RestrictNamespaces = true;
  RestrictRealtime = true;
  RestrictSUIDSGID = true;
  SystemCallArchitectures = "native";
  SystemCallErrorNumber = "EPERM";
  SystemCallFilter = [
    "@system-service"
    "~@privileged"
  ]
  ++ (if gpu then [ ] else [ "~@resources" ]);
  UMask = "0077";
}
// (
  if gpu then
    {
      DevicePolicy = "auto";
      SupplementaryGroups = "video render";
    }
  else
    { DevicePolicy = "closed"; }
)
