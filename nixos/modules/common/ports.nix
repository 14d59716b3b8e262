# Every port of our services, so that no two of them get the same one.
{ config, lib, ... }:
let
  inherit (import ./. { inherit lib config; }) check;
  cfg = config.orin.ports;
  options = lib.groupBy (option: toString cfg.${option}) (lib.attrNames cfg);
  twice = lib.filterAttrs (_: names: lib.length names > 1) options;
  # Services that share a port with ours by their defaults: the attribute that has it.
  neighbours = {
    adguardhome = "port";
    forgejo = "settings.server.HTTP_PORT";
    gitea = "settings.server.HTTP_PORT";
    llama-cpp = "port";
    ollama = "port";
    open-webui = "port";
  };
  portOf = name: lib.attrByPath (lib.splitString "." neighbours.${name}) null config.services.${name};
  taken = lib.filterAttrs (
    name: _: (config.services.${name}.enable or false) && portOf name != null
  ) neighbours;
in
{
  options.orin.ports = lib.mkOption {
    type = lib.types.attrsOf lib.types.port;
    default = { };
    internal = true;
    description = "The ports of all services that are on, by the option that sets each. The modules set it.";
  };

  config = {
    orin.ports =
      lib.optionalAttrs config.services.openssh.enable (
        lib.listToAttrs (
          lib.imap0 (
            n: lib.nameValuePair "services.openssh.ports.[${toString n}]"
          ) config.services.openssh.ports
        )
      )
      // lib.mapAttrs' (name: path: lib.nameValuePair "services.${name}.${path}" (portOf name)) taken;
    assertions = lib.mapAttrsToList (
      port: names:
      check.demand false ''
        ${lib.concatStringsSep " and " names} are both ${port}. Give one of them another port,
        as in `${lib.head names} = ${toString (lib.max 1024 (lib.toInt port) + 1)}`.''
    ) twice;
  };
}
