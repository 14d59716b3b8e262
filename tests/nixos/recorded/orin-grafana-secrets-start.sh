for secret in /var/lib/orin-grafana/grafana-admin-password /var/lib/orin-grafana/grafana-secret-key; do
  test ! -s $secret || continue
  rm -f $secret.new
  head -c 32 /dev/urandom | base64 | tr +/ -_ | tr -d '=\n' >$secret.new
  sync $secret.new
  mv $secret.new $secret
  echo "wrote $secret"
  case $secret in
  *-password) echo "$secret: $(cat $secret) (said this once)" >/dev/console ;;
  esac
done
