#!/bin/bash
# One host of the testbed:
#   host.sh run as1 CMD...   runs a command on it (the login host is `login`)
#   host.sh crash as1        a power cut: all its processes and its network go at once
#   host.sh start as1        switches it on; Slurm takes it back by itself
# After a crash, Slurm ends the host's jobs when SlurmdTimeout (30 s) is over.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"
what=$1 name=$2 ns=$TB_PREFIX-$2 pid=$TB_DIR/pids/$2
shift 2

# The kernel buries a namespace some time after its last process: the link to the switch is not left to that.
clear_network() {
  ip -n "$TB_PREFIX-login" link del "$name" 2>/dev/null || true
  ip netns del "$ns" 2>/dev/null || true
}

case $what in
  run)
    alive "$pid" || fail "host $name is not up"
    outer=$(pid_of "$pid")
    init=$(cat "/proc/$outer/task/$outer/children") && init=${init%% *}   # unshare's child: pid 1 of the host
    [ -n "$init" ] || fail "host $name is going down"
    exec nsenter -t "$init" --mount --uts --net --pid -- env -i HOME="$TB_DIR/home" USER=root LOGNAME=root \
      SHELL=/bin/bash TERM="${TERM:-dumb}" TB_MARK="$TB_DIR" PATH="$(cat "$TB_DIR/etc/path")" "$@"
    ;;
  crash)
    alive "$pid" || fail "host $name is not up"
    kill -KILL "$(pid_of "$pid")"          # unshare --kill-child: the host's pid 1 and all under it follow
    rm -f "$pid"
    clear_network
    ;;
  start)
    address=$(awk -v name="$name" '$2 == name {print $1}' "$TB_DIR/etc/hosts")
    [ -n "$address" ] || fail "no host $name"
    ! alive "$pid" || exit 0
    clear_network                          # of a start that failed half-way
    ip netns add "$ns"
    ip -n "$ns" link set lo up
    if [ "$name" = login ]; then           # the login host is also the switch
      ip -n "$ns" link add br0 type bridge
      ip -n "$ns" addr add "$address/24" dev br0
      ip -n "$ns" link set br0 up
    else
      ip -n "$ns" link add eth0 type veth peer name "$name" netns "$TB_PREFIX-login"
      ip -n "$ns" addr add "$address/24" dev eth0
      ip -n "$ns" link set eth0 up
      ip -n "$TB_PREFIX-login" link set "$name" master br0 up
    fi
    export TB_DIR TB_MARK=$TB_DIR
    setsid nsenter --net="/run/netns/$ns" unshare --mount --uts --pid --fork --kill-child --mount-proc \
      "$here/host-init.sh" "$name" </dev/null >"$TB_DIR/log/$name.log" 2>&1 &
    record "$pid" $!
    ;;
  *) fail "host.sh run|crash|start HOST" ;;
esac
