/nix/store/backupPrepareCommand

/nix/store/any/bin/restic cat config > /dev/null || /nix/store/any/bin/restic init

cat /nix/store/staticPaths >> /run/restic-backups-orin/includes


