# What the options of services that listen have in common.
{ lib }:
let
  line = import ./line.nix lib;
in
rec {
  loopback = "127.0.0.1";

  isLoopback =
    address:
    lib.elem address [
      loopback
      "::1"
      "localhost"
    ];

  # Address and port as programs take them: an IPv6 address in brackets.
  socket =
    address: port: (if lib.hasInfix ":" address then "[${address}]" else address) + ":${toString port}";

  # Where this machine itself reaches what listens there.
  reach =
    address:
    socket (
      {
        "0.0.0.0" = loopback;
        "::" = "::1";
      }
      .${address} or address
    );

  port =
    default: example: description:
    lib.mkOption {
      type = lib.types.port;
      inherit default example description;
    };

  listenAddress =
    description:
    lib.mkOption {
      type = lib.types.str;
      default = loopback;
      example = "0.0.0.0";
      inherit description;
    };

  openFirewall =
    what:
    lib.mkOption {
      type = lib.types.bool;
      default = false;
      example = true;
      description = "Whether to open ${what} to other machines.";
    };

  # An assertion: a port that is opened must be listened on from outside. `at` is the path of the
  # options, `address` the name of the one that says where to listen.
  reachable =
    {
      host,
      what,
      at,
      cfg,
      address ? "listenAddress",
    }:
    {
      assertion = cfg.openFirewall -> !isLoopback cfg.${address};
      message = line ''
        host ${host}: ${at}.openFirewall is true, but ${what} listens on ${cfg.${address}} only.
        Set `${at}.${address} = "0.0.0.0"`, or leave the firewall shut.'';
    };
}
