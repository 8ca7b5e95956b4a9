#!/bin/bash
# Brings up a real Slurm cluster on this one machine, and a SkyPilot that can launch on it. See README.md.
#
# One login host (munged, slurmctld, sshd) and TB_NODES compute hosts (slurmd each). A host is a set of Linux namespaces:
# it has a name, an address, a /tmp, a /dev/shm and processes of its own, as a machine would. Run again, it changes
# nothing when all is well.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"
export PATH=$PATH:/usr/sbin:/sbin

case $TB_DIR in /tmp | /) fail "TB_DIR must be a folder of its own" ;; /*) ;; *) fail "TB_DIR must be absolute" ;; esac
[ "$(uname)" = Linux ] && [ "$(id -u)" -eq 0 ] || fail "it takes root on Linux to make network namespaces"
missing=$("$here/packages.sh" --list)
[ -z "$missing" ] || fail "missing Debian packages: $missing (packages.sh installs them)"
for tool in python sky ray uv; do
  [ -x "$TB_VENV/bin/$tool" ] || fail "no $tool in $TB_VENV: run 'make setup', or set TB_VENV"
done

idle() { "$here/host.sh" run login sinfo -h -p gpu -t "$1" -o %D 2>/dev/null || true; }
if alive "$TB_DIR/pids/login" && [ "$(idle all)" = "$TB_NODES" ]; then
  [ -z "$TB_API_PORT" ] || "$here/api.sh" start
  say "is up already"
  exit 0
fi
"$here/down.sh" --keep-cache                     # what an interrupted run has left
mkdir -p "$TB_DIR"
for name in PREFIX CLUSTER NET PORT API_PORT NODES GPUS GPU_TYPE CPUS MEMORY_MB SHM VENV SHARE PROCTRACK; do
  declare -n value=TB_$name
  printf 'TB_%s=%q\n' "$name" "$value"
done >"$TB_DIR/settings"

"$here/configure.sh"
"$here/fill-cache.sh"
if [ -n "$TB_API_PORT" ]; then "$here/api.sh" start & api=$!; fi      # takes as long as all the rest
"$here/host.sh" start login
for i in $(seq "$TB_NODES"); do "$here/host.sh" start "$TB_PREFIX$i"; done
# ssh to the login host: accepted on the loopback, served inside the host
TB_DIR=$TB_DIR TB_MARK=$TB_DIR setsid socat "TCP-LISTEN:$TB_PORT,bind=127.0.0.1,reuseaddr,fork,backlog=64" \
  "EXEC:$here/host.sh run login /usr/sbin/sshd -i -f $TB_DIR/etc/ssh/sshd_config" \
  </dev/null >"$TB_DIR/log/socat.log" 2>&1 &
record "$TB_DIR/pids/socat" $!

for _ in $(seq 150); do
  [ "$(idle idle)" = "$TB_NODES" ] && break
  sleep 0.2
done
if [ "$(idle idle)" != "$TB_NODES" ]; then
  "$here/host.sh" run login sinfo -N -l >&2 || true
  tail -n 5 "$TB_DIR"/log/*.log >&2
  fail "its nodes did not come up (all logs: $TB_DIR/log)"
fi
[ -z "$TB_API_PORT" ] || wait "$api" || fail "no API server (log: $TB_DIR/log/api-server.log)"
say "up: $TB_NODES nodes with $TB_GPUS ${TB_GPU_TYPE^^} each, --infra slurm/$TB_CLUSTER/gpu (or /spot)"
say "in a shell: export TB_DIR=$TB_DIR; . $here/settings.sh; client_env; sky check slurm"
