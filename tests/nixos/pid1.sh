#!/usr/bin/env bash
# What runs in the new namespaces before systemd does: build a root of its own and become PID 1 in it.
#
# pid1.sh TREE [SOURCE=TARGET]...: TREE is copied into an empty root, each SOURCE is bound there read-only, and
# with rw:SOURCE=TARGET so that what is written outlives the machine.
set -euo pipefail
tree=$1
shift
root=$(mktemp -d)

mount -t tmpfs -o mode=755 root "$root"
cp -a "$tree/." "$root/"
cd "$root"
mkdir -p dev proc sys run tmp usr var/lib var/log/journal root home old
chmod 1777 tmp
for folder in bin sbin lib lib64; do ln -s "usr/$folder" "$folder"; done
bind() {
  mkdir -p "$(dirname "$2")"
  if [ -d "${1#rw:}" ]; then mkdir -p "$2"; else touch "$2"; fi
  mount --bind "${1#rw:}" "$2"
  [[ $1 == rw:* ]] || mount -o remount,bind,ro "$2"
}
bind /usr usr
for pair; do bind "${pair%%=*}" "./${pair#*=}"; done

mount -t proc proc proc
mount -t sysfs -o ro sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount -t tmpfs -o mode=755 dev dev
mkdir dev/pts dev/shm
for node in null zero full random urandom tty; do
  touch "dev/$node"
  mount --bind "/dev/$node" "dev/$node"
done
mount -t devpts -o newinstance,ptmxmode=0666 devpts dev/pts
mount -t tmpfs -o mode=1777 shm dev/shm
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
ln -s /run var/run
mount -t tmpfs -o mode=755 run run
ip link set lo up

pivot_root . old
umount --lazy /old
# Credentials of units are mounts, made elsewhere. systemd does this itself on a real machine.
mount --make-rshared /
# Our units and no other, and a manager that knows that it is no real machine.
exec env --ignore-environment container=pid1 SYSTEMD_UNIT_PATH=/etc/systemd/system SYSTEMD_GENERATOR_PATH=/none SYSTEMD_ENVIRONMENT_GENERATOR_PATH=/none PATH=/usr/bin:/usr/sbin \
  /usr/lib/systemd/systemd --system --log-target=journal --show-status=0 </dev/null
