# Settings of the testbed, read by every script here. Each can be set in the environment of `up.sh`, which writes what it
# used into $TB_DIR/settings: what stands there holds from then on, and all other scripts need TB_DIR alone.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)

: "${TB_DIR:=/tmp/areal-sky-testbed}"      # all state; an absolute path, not /tmp itself
if [ -r "$TB_DIR/settings" ]; then source "$TB_DIR/settings"; fi

: "${TB_PREFIX:=as}"                       # names of nodes (as1, as2, ...), network namespaces and cgroups
: "${TB_CLUSTER:=testbed}"                 # Slurm cluster: sky launch --infra slurm/testbed/gpu
: "${TB_NET:=10.78.0}"                     # a /24 that exists inside the namespaces only
: "${TB_PORT:=22122}"                      # the login host's ssh, on this machine's loopback
: "${TB_API_PORT=26780}"                   # SkyPilot's API server, on loopback; empty: none is started
: "${TB_NODES:=6}"                         # compute hosts
: "${TB_GPUS:=8}"                          # pretend GPUs of each
: "${TB_GPU_TYPE:=v100}"                   # SkyPilot shows it in upper case
: "${TB_CPUS:=64}"                         # of each host, as Slurm is told; not checked against this machine
: "${TB_MEMORY_MB:=500000}"                # likewise
: "${TB_SHM:=4g}"                          # limit of each host's own /dev/shm, where Ray's object store lies
: "${TB_VENV:=$root/.venv}"                # has skypilot[slurm], ray and uv: the client's, and the nodes' Ray
: "${TB_SHARE:=}"                          # more folders under /tmp that the hosts must see, with blanks between
: "${TB_PROCTRACK:=}"                      # cgroup or linuxproc; found out when empty

TB_HOME=$TB_DIR/sky-home                   # HOME of SkyPilot's client and API server: the real one stays untouched

say() { echo "testbed: $*"; }
fail() { echo "testbed: $*" >&2; exit 1; }

# A recorded process: alive, and still the one that was started (its pid may have been given away since).
alive() { [ -s "$1" ] && [ "$(cut -d' ' -f22 "/proc/$(cut -d' ' -f1 "$1")/stat" 2>/dev/null)" = "$(cut -d' ' -f2 "$1")" ]; }
# record FILE PID: notes a process with the time it was started at, which tells it from all later ones of its number.
record() { echo "$2 $(cut -d' ' -f22 "/proc/$2/stat")" >"$1"; }
pid_of() { cut -d' ' -f1 "$1"; }

# Environment of SkyPilot's client and API server.
client_env() {
  unset PYTHONDONTWRITEBYTECODE SKYPILOT_API_SERVER_ENDPOINT
  export HOME=$TB_HOME SKY_RUNTIME_DIR=$TB_HOME PATH=$TB_VENV/bin:$PATH
  export SKYPILOT_API_SERVER_LOCAL_PORT=$TB_API_PORT SKYPILOT_DISABLE_USAGE_COLLECTION=1
}

# Pids of all that the testbed's own processes have started, by the mark in their environment.
marked() { with_environment "TB_MARK=$TB_DIR" | grep -vx "$$"; }
# Pids of API servers that a client has started since it found none.
stray_servers() {
  local pid
  for pid in $(with_environment "SKY_RUNTIME_DIR=$TB_HOME"); do
    if tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null | grep -q "sky\.server\.server "; then echo "$pid"; fi
  done
}
with_environment() { grep -lszxF "$1" /proc/[0-9]*/environ | cut -d/ -f3; }
