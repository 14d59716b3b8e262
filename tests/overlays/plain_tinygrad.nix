# The series on the sdist by plain Nix (2.8), without nixpkgs: test_plain_nix.py applies and imports it.
{
  # The sdist, as a store path: pip downloads it, `builtins.path` puts it here.
  sdist,
  system ? builtins.currentSystem,
}:
let
  series = import ../../overlays/series.nix;
in
derivation {
  name = "tinygrad-${builtins.replaceStrings [ "+" ] [ "-" ] series.version}";
  inherit system;
  inherit (series) patches version;
  inherit (series.base) sha256;
  src = builtins.path {
    path = sdist;
    name = "tinygrad-${series.base.version}.tar.gz";
    recursive = false;
    inherit (series.base) sha256;
  };
  builder = "/bin/sh";
  PATH = "/usr/local/bin:/usr/bin:/bin";
  args = [
    "-euc"
    ''
      tar xzf $src
      cd tinygrad-*
      for patch in $patches; do
        patch --fuzz=0 -p1 <$patch
      done
      export HOME=$PWD PYTHONDONTWRITEBYTECODE=1 DEV=PYTHON
      python3 -c "import tinygrad; print(tinygrad.Tensor([1, 2]).sum().item())"
      mkdir $out
      cp -r . $out
      printf %s "$version" >$out/series-version
    ''
  ];
}
