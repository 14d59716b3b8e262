# Our options as Markdown, from the modules themselves: `nix build .#options`.
{ self, nixpkgs }:
let
  inherit (nixpkgs) lib;

  evaluated = lib.nixosSystem {
    modules = [
      self.nixosModules.default
      { nixpkgs.hostPlatform = "aarch64-linux"; }
    ];
  };

  # Where an option is declared, below the root of the repository.
  declaredIn = option: lib.removePrefix "${toString ../.}/" (lib.head option.declarations);

  value =
    given:
    if given ? text then
      if given._type == "literalMD" then " ${given.text}" else code given.text
    else
      code (lib.generators.toPretty { } given);
  # Inline, or as a block that belongs to the list item it follows.
  code =
    text:
    let
      lines = lib.splitString "\n" (lib.removeSuffix "\n" text);
      block = [ "```nix" ] ++ lines ++ [ "```" ];
    in
    if lib.length lines == 1 then
      " `${lib.head lines}`"
    else
      "\n\n" + lib.concatMapStringsSep "\n" (line: "  ${line}") block;

  entry =
    option:
    lib.concatStringsSep "\n" (
      [
        "### `${option.name}`"
        ""
        (lib.removeSuffix "\n" (option.description.text or option.description))
        ""
        "- type: ${option.type}"
      ]
      ++ lib.optional (option ? default) "- default:${value option.default}"
      ++ lib.optional (option ? example) "- example:${value option.example}"
      ++ [
        ""
      ]
    );

  # Types that are nixpkgs' own (a scrape target) come with options of theirs.
  isOurs = option: lib.hasPrefix (toString ../.) (lib.head option.declarations);
  options = lib.filter (option: option.visible && !option.internal && isOurs option) (
    lib.optionAttrSetToDocList evaluated.options.orin
  );
  byFile = lib.groupBy declaredIn options;
  section = file: ''
    ## `${file}`

    ${lib.concatMapStringsSep "\n" entry byFile.${file}}'';
in
''
  # Options of the NixOS modules

  `orin.*`, by the file that declares them. The page to read first is docs/nixos.md.

''
+ lib.concatMapStringsSep "\n" section (lib.attrNames byFile)
