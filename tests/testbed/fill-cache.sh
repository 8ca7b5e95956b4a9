#!/bin/bash
# Fills the hosts' uv cache with what SkyPilot installs on a node, once (needs PyPI; about 8 s). Later launches are offline.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"
version=$("$TB_VENV/bin/python" -c 'import importlib.metadata as m; print(m.version("skypilot"))')
stamp=$TB_DIR/uv-cache/.filled-$version
[ ! -e "$stamp" ] || exit 0
say "filling the nodes' package cache from PyPI (once)"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export UV_CACHE_DIR=$TB_DIR/uv-cache UV_PYTHON_DOWNLOADS=never
if [ -z "${UV_DEFAULT_INDEX:-${UV_INDEX_URL:-}}" ]; then       # uv does not read what pip was told
  index=$("$TB_VENV/bin/pip" config get global.index-url 2>/dev/null || echo "${PIP_INDEX_URL:-}")
  [ -z "$index" ] || export UV_DEFAULT_INDEX=$index
fi
uv=$TB_DIR/bin/uv
"$uv" venv -q --seed "$scratch/runtime" --python 3.10
VIRTUAL_ENV=$scratch/runtime "$uv" pip install -q "skypilot[slurm,remote]==$version"
"$uv" venv -q --seed "$scratch/user" --python "$TB_DIR/image/bin/python3"    # the user's own environment on a node
touch "$stamp"
