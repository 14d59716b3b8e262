# What the options of services that listen have in common.
{
  lib,
  check,
  option,
  switch,
}:
rec {
  loopback = "127.0.0.1";

  isLoopback = check.matches "127\\.0\\.0\\.1|::1|localhost";

  # Of addresses that a machine has from its start on.
  always = check.matches "127\\.0\\.0\\.1|::1|localhost|0\\.0\\.0\\.0|::";

  # Address and port as programs take them: an IPv6 address in brackets.
  socket =
    address: port:
    let
      # Some options of nixpkgs want the brackets themselves.
      six = lib.hasInfix ":" address && !lib.hasPrefix "[" address;
    in
    (if six then "[${address}]" else address) + ":${toString port}";

  # Where this machine itself reaches what listens there.
  reach =
    address:
    socket (
      {
        "0.0.0.0" = loopback;
        "::" = "::1";
        "[::]" = "::1";
      }
      .${address} or address
    );

  port = option lib.types.port;

  listenAddress = option lib.types.str loopback "0.0.0.0";

  openFirewall = what: switch false "Whether to open ${what} to other machines.";

  # Rules on the options below `at`: `address` is the name of the one that says where to listen, and a
  # port that is opened must be listened on from outside.
  rules =
    what: at: address: cfg:
    [
      (check.demand (cfg.openFirewall -> !isLoopback cfg.${address}) ''
        ${at}.openFirewall is true, but ${what} listens on ${cfg.${address}} only.
        Set `${at}.${address} = "0.0.0.0"`, or leave the firewall shut.'')
      (check.address "${at}.${address}" cfg.${address})
    ]
    ++ lib.optional (cfg ? port) (check.unprivileged "${at}.port" cfg.port);
}
