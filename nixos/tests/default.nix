# `nix flake check`. It builds the checks of the machine that it runs on; on a board that is tinygrad,
# our tools and a virtual machine, but nothing that needs the GPU: that is `nix build .#gpu-check`.
{ self, pkgs }:
let
  inherit (pkgs) lib;
  inherit (pkgs.python3Packages) tinygrad tinygrad-orin;
  inherit (pkgs.stdenv.hostPlatform) system;

  sources = lib.fileset.toSource {
    root = ../..;
    fileset = lib.fileset.unions [
      ../../statix.toml
      (lib.fileset.fileFilter (file: file.hasExt "nix") ../..)
    ];
  };
  lint =
    name: package: command:
    pkgs.runCommand name { nativeBuildInputs = [ package ]; } ''
      cd ${sources}
      ${command}
      touch $out
    '';

  # A check on strings that evaluation has already decided.
  decided =
    name: wrong: extra:
    pkgs.runCommand name { passthru = extra; } (
      if wrong == [ ] then "touch $out" else throw "check ${name}:\n${lib.concatStringsSep "\n" wrong}"
    );

  # The same on every system, so evaluated on one.
  wrongUse =
    if system == "x86_64-linux" then
      import ./assertions.nix { inherit self; }
    else
      self.checks.x86_64-linux.wrong-use.report;
  unexpected = lib.concatLists (
    lib.mapAttrsToList (
      name: case:
      let
        answered = text: lib.any (lib.hasInfix text) case.got;
      in
      map (text: "${name}: nothing says: ${text}") (lib.filter (text: !answered text) case.wanted)
      ++ lib.optional (lib.length case.got != lib.length case.wanted) (
        "${name}: ${toString (lib.length case.wanted)} messages wanted, got:\n"
        + lib.concatStringsSep "\n" case.got
      )
    ) wrongUse
  );

  strange =
    if system == "x86_64-linux" then
      import ./foreign.nix { inherit self; }
    else
      self.checks.x86_64-linux.foreign-host.report;

  documented = builtins.readFile ../../docs/nixos.md;
in
{
  # The series applies to the line, and what it makes imports and computes.
  inherit tinygrad tinygrad-orin;
  tinygrad-source = tinygrad.source;
  tinygrad-cpu = tinygrad.tests.cpu;
  tinygrad-sm87 = tinygrad.tests.sm87;
  pytest = tinygrad-orin.tests.pytest;

  nixfmt = lint "nixfmt" pkgs.nixfmt "find . -name '*.nix' -exec nixfmt --check {} +";
  statix = lint "statix" pkgs.statix "statix check .";
  deadnix = lint "deadnix" pkgs.deadnix "deadnix --fail --no-lambda-pattern-names .";

  wrong-use = decided "wrong-use" unexpected { report = wrongUse; };
  foreign-host = decided "foreign-host" strange { report = strange; };
  docs = decided "docs" (lib.optional (
    !lib.hasInfix self.lib.optionsMarkdown documented
  ) "docs/nixos.md is not what the modules say: `nix run .#docs` writes it anew") { };
  templates =
    if system == "x86_64-linux" then
      import ./templates.nix { inherit self pkgs; }
    else
      self.checks.x86_64-linux.templates;

  vm = import ./vm.nix { inherit self pkgs; };
}
