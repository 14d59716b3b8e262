
rm -f /run/restic-backups-orin/includes

