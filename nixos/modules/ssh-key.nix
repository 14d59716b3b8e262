# Why a public key is none, as `ssh-keygen -lf` sees it, or null: its kind, and the length of each of its
# fields (RFC 4253, 6.6; RFC 5656, 3.1). Only whether a point lies on its curve is not asked.
{ lib }:
kind: body:
let
  letters = lib.stringToCharacters "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  values = lib.listToAttrs (lib.imap0 (n: letter: lib.nameValuePair letter n) letters);
  unpadded = lib.removeSuffix "=" (lib.removeSuffix "=" body);
  sixes = map (letter: values.${letter}) (lib.stringToCharacters unpadded);
  # Four letters are three bytes.
  bytesOf =
    from:
    let
      at = n: if from + n < lib.length sixes then lib.elemAt sixes (from + n) else 0;
      number = ((at 0 * 64 + at 1) * 64 + at 2) * 64 + at 3;
    in
    [
      (number / 65536)
      (lib.mod (number / 256) 256)
      (lib.mod number 256)
    ];
  whole = lib.concatMap (n: bytesOf (4 * n)) (lib.range 0 ((lib.length sixes - 1) / 4));
  bytes = lib.take (lib.length sixes * 3 / 4) whole;
  size = lib.length bytes;
  byte = n: if n < size then lib.elemAt bytes n else 256;
  lengthAt = n: ((byte n * 256 + byte (n + 1)) * 256 + byte (n + 2)) * 256 + byte (n + 3);
  # Where each field begins, and the end; null where the last one is cut.
  starts =
    from:
    if from == size then
      [ ]
    else if from + 4 > size || from + 4 + lengthAt from > size then
      [ null ]
    else
      [ (from + 4) ] ++ starts (from + 4 + lengthAt from);
  fields = starts 0;
  lengths = map (from: lengthAt (from - 4)) fields;
  is =
    text: from:
    let
      codes = map lib.strings.charToInt (lib.stringToCharacters text);
    in
    lib.all (n: byte (from + n) == lib.elemAt codes n) (lib.range 0 (lib.length codes - 1))
    && lengthAt (from - 4) == lib.stringLength text;

  point = {
    nistp256 = 65;
    nistp384 = 97;
    nistp521 = 133;
  };
  curve = lib.removeSuffix "@openssh.com" (
    lib.removePrefix "sk-" (lib.removePrefix "ecdsa-sha2-" (lib.removePrefix "sk-" kind))
  );
  isPoint = n: byte (lib.elemAt fields n) == 4 && lib.elemAt lengths n == point.${curve};
  right =
    if kind == "ssh-ed25519" then
      lib.length fields == 2 && lib.last lengths == 32
    else if kind == "sk-ssh-ed25519@openssh.com" then
      lib.length fields == 3 && lib.elemAt lengths 1 == 32
    else if kind == "ssh-rsa" then
      # A modulus of 1024 bits and more has a zero byte in front; sshd takes no shorter one.
      lib.length fields == 3 && lib.last lengths >= 129
    else
      point ? ${curve}
      && lib.length fields == (if lib.hasPrefix "sk-" kind then 4 else 3)
      && is curve (lib.elemAt fields 1)
      && isPoint 2;
in
if builtins.match "[A-Za-z0-9+/]+={0,2}" body == null || lib.mod (lib.stringLength body) 4 != 0 then
  "it is cut, or no base64"
else if lib.elem null fields then
  "it is cut"
else if !is kind (lib.head fields) then
  "the key is of another kind than its first word says"
else if !right then
  "its fields are not those of this kind"
else
  null
