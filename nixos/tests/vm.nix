# The modules in one virtual machine, one file of this folder each: `machine` is the module under test
# with what it needs, `testScript` the proof. One machine, because each takes half a gigabyte to
# evaluate and a minute to boot on a board.
{ self, pkgs }:
let
  tests = map (file: import file { inherit self; }) [
    ./performance.nix
    ./telemetry.nix
    ./llm-server.nix
  ];
in
pkgs.testers.runNixOSTest {
  name = "tinygrad-orin";
  nodes.machine.imports = map (test: test.machine) tests;
  testScript = builtins.concatStringsSep "\n" (map (test: test.testScript) tests);
}
