# Our options, from the modules themselves, as nixpkgs makes its manual: `nix build .#options`.
{ self, pkgs }:
let
  inherit (self.inputs.nixpkgs) lib;
  evaluated = lib.nixosSystem {
    modules = [
      self.nixosModules.default
      { nixpkgs.pkgs = pkgs; }
    ];
  };
  # Types that are nixpkgs' own (a scrape target) come with options of theirs.
  ours = "${self}/";
in
pkgs.nixosOptionsDoc {
  options = { inherit (evaluated.options) orin; };
  transformOptions =
    option:
    option
    // {
      visible = option.visible && lib.hasPrefix ours (lib.head option.declarations);
      declarations = map (file: { name = lib.removePrefix ours file; }) option.declarations;
    };
}
