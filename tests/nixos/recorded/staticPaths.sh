/var/lib/orin-backup
/etc/nixos
/var/lib/orin-grafana
/var/lib/orin-cache
