# The kernels that the engine compiles for a model, made ahead on any machine: no GPU, no values of weights.
{
  lib,
  runCommand,
  tinygrad-orin,
}:

let
  build =
    {
      name,
      # The shell's words that put a GGUF file at $model.
      prepare,
      slots ? 1,
      context ? null,
      arch ? "sm_87",
      # Multiprocessors: 16 of an AGX Orin 64 GB, 14 of one with 32 GB, 8 of an NX or a Nano.
      multiprocessors ? 16,
    }:
    runCommand "orinllm-cubins-${name}" { nativeBuildInputs = [ tinygrad-orin ]; } ''
      export HOME=$TMPDIR
      ${prepare}
      orinllm compile "$model" --out $out ${
        lib.cli.toCommandLineShell
          (name: {
            option = "--${name}";
            sep = null;
            explicitBool = false;
          })
          {
            inherit arch slots context;
            sms = multiprocessors;
          }
      }
      test -n "$(ls $out)"
    '';
in
{
  # of { name = "llama"; model = ./model.gguf; slots = 4; }: those of a file that Nix has.
  of =
    { model, ... }@arguments:
    build (removeAttrs arguments [ "model" ] // { prepare = "model=${model}"; });

  # ofShape { shape = "1b"; quant = "Q6_K"; }: those of a shape of `orinbench synth`, without its gigabytes.
  ofShape =
    { shape, quant, ... }@arguments:
    build (
      removeAttrs arguments [
        "shape"
        "quant"
      ]
      // {
        name = "${shape}-${quant}";
        prepare = ''
          model=$TMPDIR/model.gguf
          orinbench synth --shape ${shape} --quant ${quant} "$model"
        '';
      }
    );
}
