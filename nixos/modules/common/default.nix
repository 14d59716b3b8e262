# What our modules have in common, for the host whose `config` it is.
{ lib, config }:
rec {
  # Words of a line: names that need no quotes.
  words = lib.splitString " ";

  # Flags and their values, two arguments each; what is null or false is left out.
  flags = lib.cli.toCommandLine (name: {
    option = "--${name}";
    sep = null;
    explicitBool = false;
  });

  # Of a type, with a default, an example and a description.
  option =
    type: default: example: description:
    lib.mkOption {
      inherit type default;
      inherit example description;
    };
  switch = default: option lib.types.bool default (!default);

  check = import ./check.nix {
    inherit lib;
    host = config.networking.hostName;
  };
  paths = import ./paths.nix { inherit lib check; };
  listening = import ./listening.nix {
    inherit lib check;
    inherit option switch;
  };
  secrets = import ./secrets.nix { inherit lib paths; };
}
