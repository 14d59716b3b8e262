# tinygrad's own tests of the release, which its sdist lacks, on the finished package: those that need
# neither a GPU, nor a network, nor torch.
{
  lib,
  runCommand,
  fetchFromGitHub,
  python,
  writableTmpDirAsHomeHook,
  tinygrad,
}:

let
  inherit (tinygrad.series) base;
  # The tree that nixpkgs' own tinygrad is built from.
  src = fetchFromGitHub {
    owner = "tinygrad";
    repo = "tinygrad";
    tag = "v${base.version}";
    hash = "sha256-cGv+swFzaMjwz40/p9OyW3HpZts09kVax2T/xYKW8sE=";
  };
  environment = python.withPackages (
    packages:
    [
      tinygrad
      packages.pytest
    ]
    # torch, and safetensors' own tests with it, wants NCCL where CUDA is on, which a Jetson has not.
    ++ lib.filter (
      package: builtins.match "safetensors|torch" package.pname == null
    ) tinygrad.optional-dependencies.testing_unit
  );
  words = lib.splitString " ";
  withTorch = words (
    "test/null/test_dtype_spec.py test/null/test_gradient.py test/unit/test_disk_tensor.py "
    + "test/unit/test_dtype_spec.py"
  );
  withNetwork = words (
    "test_dataset_is_realized test_gguf_load_no_tensor_leak test_llama_ test_load_gpt2_q4_1 test_load_sample_q6_k "
    + "test_load_tinyllama test_model_load"
  );
  # nixpkgs' expression has these too.
  withClock = words "test_flops test_recursive_pad";
  run =
    device: folder:
    "DEV=${device} python3 -m pytest -n $NIX_BUILD_CORES ${folder} ${
      lib.escapeShellArgs (
        map (file: "--ignore=${file}") withTorch
        ++ [ "-k=not (${lib.concatStringsSep " or " (withNetwork ++ withClock)})" ]
      )
    }";
in
runCommand "tinygrad-upstream-tests"
  {
    nativeBuildInputs = [
      environment
      writableTmpDirAsHomeHook
    ];
  }
  ''
    cp -r ${src} source
    chmod -R u+w source
    cd source
    # The package is what is tested.
    rm -r tinygrad
    ${run "NULL" "test/null"}
    ${run "CPU" "test/test_tiny.py test/unit"}
    touch $out
  ''
