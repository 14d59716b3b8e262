/var/lib/orin-backup
/var/lib/orin-grafana
