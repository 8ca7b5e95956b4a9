#!/bin/bash
# Takes the testbed down: ends the processes that it recorded, then what these have started in turn, known by the mark
# in their environment. Nothing else is touched. Fails when anything is left. --keep-cache keeps the package cache.
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"
[ -d "$TB_DIR" ] || exit 0

for file in "$TB_DIR"/pids/*; do
  if alive "$file"; then
    case $file in
      */api-server | */socat) kill -KILL -- "-$(pid_of "$file")" 2>/dev/null ;;   # first of a process group (setsid)
      *) kill -KILL "$(pid_of "$file")" 2>/dev/null ;;                            # all of the host follows
    esac
  fi
  rm -f "$file"
done
for stray in $(stray_servers); do kill -KILL -- "-$stray" 2>/dev/null; done
for _ in $(seq 50); do
  left=$(marked)
  [ -n "$left" ] || break
  kill -KILL $left 2>/dev/null
  sleep 0.1
done
for namespace in $(ip netns list 2>/dev/null | cut -d' ' -f1); do
  case $namespace in "$TB_PREFIX-login" | "$TB_PREFIX-$TB_PREFIX"[0-9]*) ip netns del "$namespace" ;; esac
done
find /sys/fs/cgroup/freezer/slurm_"$TB_PREFIX"[0-9]* -depth -type d -exec rmdir {} \; 2>/dev/null
if [ "${1:-}" = --keep-cache ]; then
  find "$TB_DIR" -mindepth 1 -maxdepth 1 ! -name uv-cache -exec rm -rf {} +
else
  rm -rf "$TB_DIR"
fi
left=$(marked)
[ -z "$left" ] || fail "still there: $(ps -o pid=,args= -p $left)"
[ "${1:-}" = --keep-cache ] || [ ! -e "$TB_DIR" ] || fail "cannot remove $TB_DIR"
