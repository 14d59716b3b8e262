# A message on one line, whatever the lines are that it is written in.
lib: text:
lib.concatStringsSep " " (lib.filter (each: each != "") (map lib.trim (lib.splitString "\n" text)))
