#!/bin/bash
# A private systemd as PID 1 of namespaces of its own (pid, mount, uts, ipc, cgroup, net), on an overlay of / that is
# thrown away: nothing it writes reaches this machine's disk, and its network holds lo alone. Needs root, systemd, dbus,
# util-linux, iproute2.
#
#     box.sh start DIR SOURCE:TARGET...    DIR: where it may keep its files; directories to show inside, read-only
#     box.sh exec DIR COMMAND...           in all of its namespaces
#     box.sh link DIR DIR                  joins two by a cable: 10.77.0.1 and 10.77.0.2
#     box.sh stop DIR
set -euo pipefail

# What is of no use without a machine, or would reach out of the box: tmpfiles would empty /tmp, audit has no namespace.
MASKED="systemd-udevd.service systemd-udev-trigger.service systemd-udevd-control.socket systemd-udevd-kernel.socket
  systemd-journald-audit.socket systemd-networkd.service systemd-resolved.service systemd-timesyncd.service
  systemd-binfmt.service systemd-modules-load.service kmod-static-nodes.service dev-hugepages.mount dev-mqueue.mount
  sys-kernel-debug.mount sys-kernel-tracing.mount sys-kernel-config.mount sys-fs-fuse-connections.mount
  proc-sys-fs-binfmt_misc.automount systemd-sysctl.service systemd-random-seed.service systemd-remount-fs.service
  systemd-firstboot.service systemd-sysusers.service systemd-tmpfiles-setup.service systemd-tmpfiles-setup-dev.service
  systemd-tmpfiles-clean.timer systemd-update-utmp.service apt-daily.timer apt-daily-upgrade.timer"

init_of() { cut -d' ' -f1 "$1/init"; }

start() {
  local dir=$1 group outer inner; shift
  mkdir -p "$dir/box"
  group=$(findmnt -nt cgroup2 -o TARGET | head -1)/box-$$
  mkdir "$group"
  ( echo "$BASHPID" > "$group/cgroup.procs"
    exec unshare --mount --pid --fork --uts --ipc --cgroup --net --kill-child \
      bash "$0" boot "$dir/box" "$@" ) > "$dir/log" 2>&1 < /dev/null &
  outer=$!
  for _ in $(seq 150); do
    inner=$(pgrep -P $outer | head -1 || true)
    if [ -n "$inner" ] && [ "$(nsenter -t "$inner" -a systemctl is-system-running 2> /dev/null || true)" = running ]; then
      echo "$inner $group" > "$dir/init"; return 0
    fi
    sleep 0.1
  done
  kill -KILL $outer 2> /dev/null || true
  echo "the box did not start" >&2; cat "$dir/log" >&2; return 1
}

stop() {
  local inner group
  read -r inner group < "$1/init"
  kill -KILL "$inner" 2> /dev/null || true  # unshare passes no SIGTERM on; all of the box ends with its PID 1
  for _ in $(seq 100); do kill -0 "$inner" 2> /dev/null || break; sleep 0.1; done
  find "$group" -depth -type d -exec rmdir {} \;
  rm -f "$1/init"
}

link() {  # the ends move into the boxes, and go with them
  local first second; first=$(init_of "$1"); second=$(init_of "$2")
  ip link add "box$first" type veth peer name "box$second"
  ip link set "box$first" netns "$first" name cable
  ip link set "box$second" netns "$second" name cable
  nsenter -t "$first" -n ip address add 10.77.0.1/24 dev cable; nsenter -t "$first" -n ip link set cable up
  nsenter -t "$second" -n ip address add 10.77.0.2/24 dev cable; nsenter -t "$second" -n ip link set cable up
}

boot() {  # in the namespaces, as their PID 1, which becomes systemd
  local box=$1 root=$1/root pair name; shift
  mount --make-rprivate /
  mount -t tmpfs -o mode=755 box "$box"; mkdir -p "$box"/{up,work,root}
  mount -t overlay box -o "lowerdir=/,upperdir=$box/up,workdir=$box/work" "$root"
  for pair in "$@"; do
    mkdir -p "$root${pair#*:}"
    mount --bind "${pair%%:*}" "$root${pair#*:}"; mount -o remount,bind,ro "$root${pair#*:}"
  done
  mount -t proc proc "$root/proc"; mount -t sysfs -o ro sysfs "$root/sys"
  mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
  mount -t tmpfs -o mode=755 dev "$root/dev"
  for name in null zero full random urandom tty; do : > "$root/dev/$name"; mount --bind "/dev/$name" "$root/dev/$name"; done
  mkdir -p "$root"/dev/{pts,shm}; mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
  ln -s pts/ptmx "$root/dev/ptmx"; ln -s /proc/self/fd "$root/dev/fd"
  mount -t tmpfs -o mode=1777 shm "$root/dev/shm"
  mount -t tmpfs -o mode=755 run "$root/run"; mount -t tmpfs -o mode=755 log "$root/var/log"
  mkdir -p "$root/run/systemd/system"
  for name in $MASKED; do ln -s /dev/null "$root/run/systemd/system/$name"; done
  printf '[Unit]\nRequires=sysinit.target dbus.socket\nAfter=sysinit.target dbus.socket\nAllowIsolate=yes\n' \
    > "$root/run/systemd/system/box.target"
  ip link set lo up
  mkdir "$root/oldroot"; cd "$root"; pivot_root . oldroot; cd /; umount -l /oldroot
  mount --make-rshared /  # credentials are mounted beside and passed on, as they are where systemd boots a machine
  exec env -i container=box PATH=/usr/sbin:/usr/bin:/sbin:/bin \
    /lib/systemd/systemd --system --unit=box.target --log-target=journal --show-status=0 < /dev/null
}

case ${1:?} in
  start) shift; start "$@" ;;
  exec) inner=$(init_of "$2"); shift 2; exec nsenter -t "$inner" -a "$@" ;;
  link) shift; link "$@" ;;
  stop) shift; stop "$@" ;;
  boot) shift; boot "$@" ;;
esac
