# The base of tinygrad and the patches on it, as `tools/series` reads them too. Builtins only, so
# that plain Nix can use it without nixpkgs.
let
  folder = ../patches/tinygrad;
  read = name: builtins.readFile (folder + "/${name}");
  isName = line: builtins.isString line && line != "";

  base = builtins.fromJSON (read "base.json");
  names = builtins.filter isName (builtins.split "\n" (read "series"));
  hash = builtins.hashString "sha256" (
    builtins.concatStringsSep "" (
      map read (
        [
          "base.json"
          "series"
        ]
        ++ names
      )
    )
  );
in
{
  # { name, version, sha256 } of the sdist on PyPI.
  inherit base names;

  # In the order in which they apply.
  patches = map (name: folder + "/${name}") names;

  # SHA-256 over base.json, the series file and each patch in order, in hex.
  inherit hash;

  # What importlib.metadata.version("tinygrad") says once the series is applied.
  version = "${base.version}+orin.${builtins.substring 0 12 hash}";
}
