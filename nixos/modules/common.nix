# What our modules have in common, for the host whose `config` it is.
{ lib, config }:
rec {
  # Of a type, with a default, an example and a description.
  option =
    type: default: example: description:
    lib.mkOption {
      inherit
        type
        default
        example
        description
        ;
    };
  switch = default: option lib.types.bool default (!default);

  check = import ./check.nix {
    inherit lib;
    host = config.networking.hostName;
  };
  paths = import ./paths.nix { inherit lib check; };
  listening = import ./listening.nix {
    inherit
      lib
      check
      option
      switch
      ;
  };
  secrets = import ./secrets.nix { inherit lib paths; };
}
