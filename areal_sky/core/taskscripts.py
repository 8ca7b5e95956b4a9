"""The bash of generated SkyPilot tasks: `setup` and `run` of a head and of a node.

The text is constant but for the user's own scripts, which stand between quoted here-documents and are run by `eval`
in a subshell: nothing of a spec (names, values, paths) is ever spliced into a line of bash. What differs per machine
comes from the environment. A subshell, not another bash, since SkyPilot's shells define functions (conda's) that a
script may call.
"""

from __future__ import annotations

from areal_sky.core.installscript import install_script

# How long a process that keeps failing is started again before its machine is given up.
GIVE_UP_S = 600
# A process that lived this long had started well: its end is a new failure, not the old one going on.
STARTED_WELL_S = 60
# Ray hands out these ports to its own workers (Ray 2.60, --min-worker-port and --max-worker-port).
RAY_WORKER_PORTS = (10002, 19999)

_HEAD_NEEDS = ("AREAL_SKY_TOKENS",)
_NODE_NEEDS = ("AREAL_SKY_HEAD_IP", "AREAL_SKY_NODE_TOKEN", "AREAL_SKY_RAY_TOKEN")

_NEEDS = """\
# A missing value ends this at once, with its name, before anything is installed or waited for.
for areal_sky_name in {names}; do
  if [ -z "${{!areal_sky_name:-}}" ]; then
    echo "areal_sky: $areal_sky_name is not set; the head of this file says how to give it" >&2
    exit 78
  fi
done
"""

_USER_SETUP = """\
# The user's own setup, in a subshell: what it activates must not decide where areal_sky is installed.
IFS= read -r -d '' areal_sky_user_setup <<'{end}' || true
{text}
{end}
( eval "$areal_sky_user_setup" )
areal_sky_code=$?
if [ "$areal_sky_code" -ne 0 ]; then
  echo "areal_sky: the task's own setup ended with code $areal_sky_code" >&2
  exit "$areal_sky_code"
fi
"""

_KEEP = """\
# Starts `areal-sky $1` until it ends as planned (0: drained, or its lease was not renewed) or can never work (2, 78).
# Ray and the tasks live on in sessions of their own meanwhile; the next start adopts them.
areal_sky_keep() {{
  local code started=$SECONDS failing=$SECONDS
  until areal-sky "$1"; do
    code=$?
    case $code in 2 | 78) return "$code" ;; esac
    if [ $((SECONDS - started)) -gt {well} ]; then failing=$SECONDS; fi
    if [ $((SECONDS - failing)) -gt {give_up} ]; then
      echo "areal_sky: areal-sky $1 has failed for {give_up} s (last code $code); giving this machine up" >&2
      return "$code"
    fi
    echo "areal_sky: areal-sky $1 ended with code $code; starting it again" >&2
    sleep 1
    started=$SECONDS
  done
}}
"""

_HEAD_RUN = """\
export PATH="$HOME/.areal_sky/bin:$HOME/.local/bin:$PATH"
export RAY_AUTH_MODE=token
# Ports are checked on the first start only: later, what listens there is our own Ray, which is adopted.
for areal_sky_port in "$AREAL_SKY_RAY_PORT" "$AREAL_SKY_GATEWAY_PORT"; do
  if [ "$areal_sky_port" -ge {low} ] && [ "$areal_sky_port" -le {high} ]; then
    echo "areal_sky: port $areal_sky_port is in Ray's worker range {low}-{high}; choose another" >&2
    exit 78
  fi
  if [ ! -e "$HOME/.areal_sky/head/$AREAL_SKY_CLUSTER/ray.json" ] &&
    (exec 3<>"/dev/tcp/127.0.0.1/$areal_sky_port") 2>/dev/null; then
    echo "areal_sky: port $areal_sky_port is in use on this machine; end what listens there, or give" \\
      "--env AREAL_SKY_RAY_PORT=N or --env AREAL_SKY_GATEWAY_PORT=N here and to every node" >&2
    exit 78
  fi
done
export AREAL_SKY_STATE_DIR="$HOME/.areal_sky/head/$AREAL_SKY_CLUSTER"
echo "areal_sky: head of $AREAL_SKY_CLUSTER; nodes join with" \\
  "--env AREAL_SKY_HEAD_IP=$(printf '%s\\n' "${{SKYPILOT_NODE_IPS:-127.0.0.1}}" | head -n 1)"
"""

_NODE_RUN = """\
export PATH="$HOME/.areal_sky/bin:$HOME/.local/bin:$PATH"
export RAY_AUTH_MODE=token
# One folder per node: on Slurm and Kubernetes the home folder may be shared.
export AREAL_SKY_STATE_DIR="$HOME/.areal_sky/nodes/$AREAL_SKY_REPLICA-${SKYPILOT_NODE_RANK:-0}"
mkdir -p -m 700 "$AREAL_SKY_STATE_DIR"
"""

_USER_RUN = """\
# The user's own run, beside the node: it starts once the node has joined, and its end does not end the node.
IFS= read -r -d '' areal_sky_user_run <<'{end}' || true
{text}
{end}
areal_sky_user() (
  until [ -e "$AREAL_SKY_STATE_DIR/joined" ]; do sleep 1; done
  unset AREAL_SKY_NODE_TOKEN
  areal_sky_bin=$(dirname "$(readlink -f "$(command -v areal-sky)")")
  if [ -e "$areal_sky_bin/../apart" ] || [ -n "${{AREAL_SKY_OWN_RAY:-}}" ]; then
    # The image's Ray cannot speak with ours, or is not to: what it starts on this machine is a cluster of its own.
    unset RAY_AUTH_MODE AREAL_SKY_RAY_TOKEN
  else
    export PATH="$areal_sky_bin:$PATH" # its `python` sees all that the machine's sees
    export RAY_ADDRESS="$AREAL_SKY_HEAD_IP:$AREAL_SKY_RAY_PORT" RAY_AUTH_TOKEN="$AREAL_SKY_RAY_TOKEN"
    export RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL=minor
  fi
  # One Ray for all: this machine is in the cluster already, and RAY_ADDRESS is where `ray.init()` goes.
  # `stop` would end every Ray on this machine, the cluster's included.
  ray() {{
    case ${{1:-}}-${{RAY_ADDRESS:-}} in
      stop-* | start-?*) echo "areal_sky: left out: ray $*; this machine is in the cluster's Ray" >&2 ;;
      *) command ray "$@" ;;
    esac
  }}
  export -f ray
  eval "$areal_sky_user_run"
)
rm -f "$AREAL_SKY_STATE_DIR/joined"
set -m # a process group of its own, to be ended whole
{{
  areal_sky_user
  echo "areal_sky: the task's own run ended with code $?; the node stays" >&2
}} </dev/null &
areal_sky_user_pid=$!
set +m
"""

_END_USER_RUN = """\
# The machine must be idle now, or SkyPilot's autostop would never take it.
kill -TERM -- "-$areal_sky_user_pid" 2>/dev/null
for _ in 1 2 3 4 5 6 7 8 9 10; do
  kill -0 -- "-$areal_sky_user_pid" 2>/dev/null || break
  sleep 1
done
kill -KILL -- "-$areal_sky_user_pid" 2>/dev/null
"""


def head_setup() -> str:
    return _needs(_HEAD_NEEDS) + install_script()


def head_run() -> str:
    low, high = RAY_WORKER_PORTS
    return _HEAD_RUN.format(low=low, high=high) + _keep() + "areal_sky_keep head\n"


def node_setup(user_setup: str | None) -> str:
    """`user_setup` runs first; its failure is the failure of the whole."""
    own = _needs(_NODE_NEEDS)
    if user_setup and user_setup.strip():
        own += _with_text(_USER_SETUP, user_setup, "AREAL_SKY_SETUP")
    return own + install_script()


def node_run(user_run: str | None) -> str:
    """Joins, and stays until the planned end. `user_run` runs beside it on every node, with SkyPilot's variables."""
    if not (user_run and user_run.strip()):
        return _needs(_NODE_NEEDS) + _NODE_RUN + _keep() + "areal_sky_keep node\n"
    return (
        _needs(_NODE_NEEDS)
        + _NODE_RUN
        + _with_text(_USER_RUN, user_run, "AREAL_SKY_RUN")
        + _keep()
        + "areal_sky_keep node\nareal_sky_code=$?\n"
        + _END_USER_RUN
        + 'exit "$areal_sky_code"\n'
    )


def _needs(names: tuple[str, ...]) -> str:
    return _NEEDS.format(names=" ".join(names))


def _keep() -> str:
    return _KEEP.format(well=STARTED_WELL_S, give_up=GIVE_UP_S)


def _with_text(template: str, text: str, end: str) -> str:
    """The template with `text` as a here-document whose end mark is no line of the text."""
    lines = set(text.splitlines())
    mark, n = end, 1
    while mark in lines:
        n += 1
        mark = f"{end}_{n}"
    return template.format(text=text.removesuffix("\n"), end=mark)
