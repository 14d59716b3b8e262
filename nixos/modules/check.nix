# Rules on the values of options. A broken one is a line: the option, its value, what is right.
{ lib, host }:
rec {
  matches = pattern: text: builtins.match pattern text != null;

  rule = option: value: ok: right: {
    assertion = ok;
    message = "host ${host}: ${option} = ${show value}: ${right}";
  };

  # A time as Prometheus writes it (model.ParseDuration).
  duration =
    option: value:
    rule option value (matches "([0-9]+(ms|[ywdhms]))+" value)
      ''write a number and a unit of ms s m h d w y without a space, as in "30d" or "5s"'';

  # An address to listen on: IPv4, IPv6 or a name, and no port.
  address =
    option: value:
    rule option value (
      matches "[0-9]{1,3}(\\.[0-9]{1,3}){3}" value
      || matches "[0-9a-f:]*:[0-9a-f:]*:[0-9a-f:.]*" value
      || matches "[a-zA-Z][a-zA-Z0-9.-]*" value
    ) ''write an address alone, as in "127.0.0.1", "0.0.0.0" or "::"; the port has an option of its own'';

  # Ports below 1024 are root's, and none of our services is.
  unprivileged =
    option: value:
    rule option value (value >= 1024)
      "this service does not run as root, which ports below 1024 need: take one from 1024 on, as in ${toString (value + 8000)}";

  url =
    option: value:
    rule option value (matches "https?://[^[:space:]]+" value)
      ''write the scheme too, as in "https://metrics.example.org/api/v1/write"'';

  # Names of environment variables.
  variables =
    option: environment:
    map (
      name:
      rule "${option}.${show name}" environment.${name} (matches "[A-Za-z_][A-Za-z0-9_]*" name)
        ''a variable's name has letters, digits and _ alone, as in `${option}.DEBUG = "2"`''
    ) (lib.attrNames environment);

  show = lib.generators.toPretty { multiline = false; };
}
