set -eu
# What a power cut has left of an earlier one.
/nix/store/any/bin/restic unlock --quiet || true
# A host that is deployed from elsewhere has no flake here, and restic calls that a failure.
mkdir -p /var/lib/orin-backup /etc/nixos
chmod 0700 /var/lib/orin-backup
if [ -e /var/lib/grafana/data/grafana.db ]; then
  /nix/store/any/bin/sqlite3 /var/lib/grafana/data/grafana.db '.backup '\''/var/lib/orin-backup/grafana.db'\'''
fi
if [ -e /home/orin/.local/state/tinygrad-orin/history.db ]; then
  /nix/store/any/bin/sqlite3 /home/orin/.local/state/tinygrad-orin/history.db '.backup '\''/var/lib/orin-backup/history.db'\'''
fi
