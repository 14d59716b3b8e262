set -eu
# What a power cut has left of an earlier one.
/nix/store/any/bin/restic unlock --quiet || true
install -d -m 0700 /var/lib/orin-backup
if [ -e /var/lib/grafana/data/grafana.db ]; then
  /nix/store/any/bin/sqlite3 /var/lib/grafana/data/grafana.db '.backup '\''/var/lib/orin-backup/grafana.db'\'''
fi
if [ -e /home/orin/.local/state/tinygrad-orin/history.db ]; then
  /nix/store/any/bin/sqlite3 /home/orin/.local/state/tinygrad-orin/history.db '.backup '\''/var/lib/orin-backup/history.db'\'''
fi
