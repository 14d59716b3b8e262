# What a path of an option has to be: a file of the board, named from the root, that systemd can be told.
{ lib, check }:
rec {
  inStore = path: lib.hasPrefix builtins.storeDir (toString path);
  # systemd splits at spaces and colons, and takes % and \ for its own.
  plain =
    path:
    check.matches "/[^[:space:]:%\\\"']*" (toString path)
    && !lib.elem ".." (lib.splitString "/" (toString path));
  # A folder that may be given to somebody: none of the system's, and no service's state.
  ownable =
    path:
    plain path
    && !inStore path
    && !check.matches "/((bin|boot|dev|etc|lib|lib64|nix|proc|root|run|sbin|sys|tmp|usr)(/.*)?|home|srv|mnt|var|var/(cache|lib|log|tmp)|var/(cache|lib|log)/(grafana|nixos|orin-(backup|cache|grafana|upgrade)|private|prometheus2|secrets|systemd)(/.*)?)?/*" (
      toString path
    );

  # Homes of a host's users: whoever is given one locks its owner out.
  homes = config: lib.mapAttrsToList (_: user: user.home) config.users.users;

  # A rule: a file outside the store, or null for none. `why` not in the store, and a right `example`.
  file =
    option: path: why: example:
    let
      given = toString path;
      said = ''${option} = "${given}"'';
      # systemd-tmpfiles removes what lies there for days.
      passing = check.matches "/(var/)?tmp/.*" given;
      # A rebuild copies the flake's folder there.
      stored = inStore path || lib.hasPrefix "/etc/nixos/" given;
      stays = plain path && !stored && !passing;
    in
    check.demand (path == null || stays && !lib.hasSuffix "/" given) (
      if passing then
        ''
          ${said} is in a folder that is emptied of old files by itself.
          Write it where files stay, as in "${example}".''
      else if stored then
        ''
          ${option} is in the Nix store or copied there (${given}), ${why}.
          Write it as a string that names a file on the board, as in `${option} = "${example}"`.''
      else if !lib.hasPrefix "/" given then
        ''${said} is no absolute path. Write it from the root, as in "${example}".''
      else if plain path then
        ''${said} ends with a slash, as a folder does. Name the file, as in "${example}".''
      else
        ''
          ${said} holds a space, a quote, a .. or one of : % \, which systemd
          does not take or reads as its own. Rename the file, as in "${example}".''
    );
  secret = option: path: file option path "which everyone can read";
}
