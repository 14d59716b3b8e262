# Rules on the values of options. A broken one is a line: the option, its value, what is right.
{ lib, host }:
rec {
  matches = pattern: text: builtins.match pattern text != null;

  # The message is one line, whatever the lines are that it is written in.
  demand = ok: text: {
    assertion = ok;
    message =
      "host ${host}: "
      + lib.concatStringsSep " " (
        lib.filter (each: each != "") (map lib.trim (lib.splitString "\n" text))
      );
  };

  rule = option: value: ok: right: {
    assertion = ok;
    message = "host ${host}: ${option} = ${show value}: ${right}";
  };

  # A time as Prometheus writes it (model.ParseDuration), and no zero: that would be its default.
  duration =
    option: value:
    rule option value
      (
        matches "([0-9]+y)?([0-9]+w)?([0-9]+d)?([0-9]+h)?([0-9]+m)?([0-9]+s)?([0-9]+ms)?" value
        && milliseconds value > 0
      )
      ''write a number and a unit of ms s m h d w y without a space, as in "30d" or "5s"; of several, the longest first'';

  milliseconds =
    value:
    lib.foldl (
      sum: part:
      sum
      +
        lib.toIntBase10 (lib.head part)
        * {
          ms = 1;
          s = 1000;
          m = 60000;
          h = 3600000;
          d = 86400000;
          w = 604800000;
          y = 31536000000;
        }
        .${lib.last part}
    ) 0 (lib.filter lib.isList (builtins.split "([0-9]+)(ms|[ywdhms])" value));

  # When, as systemd.time(7) writes it: a word, or weekdays, date, time and zone.
  calendar =
    option: value:
    let
      day = "(Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]*";
      days = "${day}((,|\\.\\.)${day})*";
      date = "[0-9*/,.~]+-[0-9*/,.~-]+";
      time = "[0-9*/,.]+:[0-9*/,.:]+";
      # Hours, minutes and seconds; months and days, the last two of a date's.
      numbers =
        part:
        map (n: lib.toIntBase10 (lib.head n)) (lib.filter lib.isList (builtins.split "([0-9]+)" part));
      within =
        limits: parts:
        lib.all lib.id (
          lib.zipListsWith (limit: part: lib.all (n: n <= limit) (numbers part)) limits parts
        );
      sensible =
        word:
        if lib.hasInfix ":" word then
          within [ 23 59 59 ] (lib.splitString ":" word)
        else
          !matches date word || within [ 31 12 ] (lib.reverseList (lib.splitString "-" word));
    in
    rule option value
      (
        lib.all sensible (lib.splitString " " value)
        && (
          matches "minutely|hourly|daily|weekly|monthly|quarterly|semiannually|yearly|annually" value
          || matches "(${days}|${date}|${time}|(${days} )?(${date} )?${time}|${days} ${date})( UTC| [A-Z][A-Za-z_]+/[A-Za-z_/]+)?" value
        )
      )
      ''write it as systemd.time(7) does, as in "daily", "04:40" or "Sun 03:00"; `systemd-analyze calendar` tells'';

  # An address must not hold a password: the Nix store is open to all.
  noPassword =
    option: value: instead:
    rule option (lib.head (lib.splitString "://" value) + "://...") (
      !matches ".*://[^/@]*:[^/@]*@.*" value
    ) "a password in an address would lie in the Nix store for everyone to read; ${instead}";

  # Names and values, at any depth of a tool's own settings, that are wanted.
  settingsWhere =
    wanted: settings:
    if lib.isList settings then
      lib.concatMap (settingsWhere wanted) settings
    else if lib.isAttrs settings then
      lib.concatLists (
        lib.mapAttrsToList (
          name: value:
          if wanted name value then [ (lib.nameValuePair name value) ] else settingsWhere wanted value
        ) settings
      )
    else
      [ ];

  # The same of settings that a tool has its own format for: names of attributes, at any depth.
  secretsIn =
    settings:
    map (found: found.name) (
      settingsWhere (
        name: value:
        lib.isString value
        && (
          matches ".*(password|secret|secret_key|token|credentials|api_key|service_key|routing_key|slack_api_url|webhook_url)" (
            lib.toLower name
          )
          || matches ".*://([^/@]*:[^/@]*@|hooks\\.slack\\.com/).*" value
        )
      ) settings
    );
  noSecrets =
    option: settings: instead:
    rule option (secretsIn settings) (
      secretsIn settings == [ ]
    ) "this would lie in the Nix store for everyone to read; ${instead}";

  # Files that such settings name: without a folder, a tool looks beside its configuration, in the store.
  filesIn = settingsWhere (name: value: lib.isString value && lib.hasSuffix "_file" name);
  absoluteFiles =
    option: settings:
    map (
      file:
      rule "${option}, ${file.name}" file.value
        (
          lib.hasPrefix "/" file.value
          && (
            !lib.hasPrefix builtins.storeDir file.value
            # Certificates are for all to see.
            || matches "ca_file|cert_file" file.name
          )
        )
        ''write a file of the board from the root, and outside the Nix store, as in "/var/lib/secrets/key"''
    ) (filesIn settings);

  # A flag and its value are two arguments: no shell splits them.
  flags =
    option: given:
    rule option given
      (!lib.any (matches "|-[^=]*[[:space:]].*") given && matches "(-.*)?" (lib.head (given ++ [ "" ])))
      ''flags come first, and a flag and its value are two arguments; write them as two strings, as in [ "--sample-rate" "20" ]'';

  # Of tinygrad's names (tinygrad/device.py) those that an Orin has the hardware for.
  device =
    option: value:
    rule option value (
      value == null || matches "(CPU|CUDA|NULL|NV|PYTHON)(:.*)?" value
    ) "tinygrad has none of this name on an Orin; write NV, CUDA or CPU in capitals, or null";

  octet = "(25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])";
  ipv4 = "(${octet}\\.){3}${octet}";

  # An address to listen on: IPv4, IPv6 or a name, and no port.
  address =
    option: value:
    rule option value
      (
        matches ipv4 value
        || matches "[0-9a-f:]*:[0-9a-f:]*:[0-9a-f:.]*" value
        || matches "[a-zA-Z][a-zA-Z0-9.-]*" value
      )
      ''write an address alone, as in "127.0.0.1", "0.0.0.0" or "::"; the port has an option of its own'';

  # Ports below 1024 are root's, and none of our services is.
  unprivileged =
    option: value:
    rule option value (value >= 1024)
      "this service does not run as root, which ports below 1024 need: take one from 1024 on, as in ${toString (value + 8000)}";

  url =
    option: value:
    rule option value (matches "https?://[^[:space:]]+" value)
      ''write the scheme too, as in "https://metrics.example.org/api/v1/write"'';

  # Names of environment variables; what they hold is no secret, and no option's.
  variables =
    option: environment:
    let
      theirs = lib.filter (matches "HOME|LD_LIBRARY_PATH|LD_PRELOAD|(PYTHON)?PATH|SHELL|USER|XDG_CACHE_HOME") (
        lib.attrNames environment
      );
    in
    [
      (noSecrets option environment "use a file that the program reads, named by an option")
      (rule "${option}.DEV" (environment.DEV or null) (
        !environment ? DEV
      ) "an option sets it; leave it out and set `orin.tinygrad.device`, or `orin.llm-server.device`")
      (rule option theirs (
        theirs == [ ]
      ) "every program reads it, and no login would find its own; leave it out")
    ]
    ++ map (
      name:
      rule "${option}.${show name}" environment.${name} (matches "[A-Za-z_][A-Za-z0-9_]*" name)
        ''a variable's name has letters, digits and _ alone, as in `${option}.DEBUG = "2"`''
    ) (lib.attrNames environment);

  show = lib.generators.toPretty { multiline = false; };
}
