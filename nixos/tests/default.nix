# `nix flake check`. It builds the checks of the machine that it runs on: tinygrad and our tools, but nothing
# that needs the GPU. That is `nix build .#gpu-check`.
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

  # The same on every system, so evaluated once.
  once =
    name: file:
    if system == "x86_64-linux" then
      import file { inherit self; }
    else
      self.checks.x86_64-linux.${name}.report;
  wrongUse = once "wrong-use" ./assertions.nix;
  strange = once "foreign-host" ./foreign.nix;
  templates = once "templates" ./templates.nix;
  said = lib.concatLists (lib.attrValues wrongUse);
  unclear = lib.filter (text: !lib.hasPrefix "host board: " text || lib.hasInfix "\n" text) said;

in
{
  # The series applies to the line, and what it makes imports and computes.
  inherit tinygrad tinygrad-orin;
  tinygrad-source = tinygrad.source;
  tinygrad-cpu = tinygrad.tests.cpu;
  tinygrad-sm87 = tinygrad.tests.sm87;
  inherit (tinygrad-orin.tests) pytest;

  nixfmt = lint "nixfmt" pkgs.nixfmt "find . -name '*.nix' -exec nixfmt --check {} +";
  statix = lint "statix" pkgs.statix "statix check .";
  deadnix = lint "deadnix" pkgs.deadnix "deadnix --fail --no-lambda-pattern-names .";

  wrong-use = decided "wrong-use" unclear { report = wrongUse; };
  foreign-host = decided "foreign-host" strange { report = strange; };
  inherit (self.packages.${system}) options;
  templates = decided "templates" templates.wrong { report = templates; };
}
