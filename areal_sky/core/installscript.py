"""The bash with which a machine gets areal_sky: into a venv of its own, beside what the image and SkyPilot have.

The machine's own Python is used where it has the right Ray (or where AREAL_SKY_PYTHON names it): the venv then sees
everything that Python sees, so that tasks, and Ray's workers, keep the image's torch, AReaL and so on. Nothing is
installed into that Python, which may be shared by many users. A shipped wheel is only unpacked, so that a machine
without a network that has the dependencies needs no pip at all; what is missing is asked of pip or uv.
"""

from __future__ import annotations

# Head and nodes must have the same Ray; `areal-sky` of this version is tested with it.
RAY_VERSION = "2.60.0"
# The Python of a venv that shares nothing with the image: uv's own, so that it is the same one on every machine.
UV_PYTHON = "3.12"

_INSTALL = r"""
# areal_sky, into a venv of its own under ~/.areal_sky. Neither the image's Python nor SkyPilot's runtime is changed.
export PATH="$HOME/.areal_sky/bin:$HOME/.local/bin:$PATH"

areal_sky_say() { echo "areal_sky: $*" >&2; }
areal_sky_fail() { areal_sky_say "$@"; return 1; }

# The Python to build on: AREAL_SKY_PYTHON, else the first of python3, python and the one that `ray` runs in which has
# the Ray of this cluster's minor version. None: a Python that shares nothing with the image.
areal_sky_base() {
  local python ray
  if [ -n "${AREAL_SKY_PYTHON:-}" ]; then
    command -v "${AREAL_SKY_PYTHON/#\~/$HOME}" || areal_sky_fail "AREAL_SKY_PYTHON: no $AREAL_SKY_PYTHON here"
    return
  fi
  ray=$(head -n 1 "$(command -v ray)" 2>/dev/null | tr -d '\0' | sed -n 's/^#!\(\/[^ ]*python[^ ]*\)$/\1/p')
  for python in python3 python "$ray"; do
    python=$(command -v "$python") || continue
    case $python in *skypilot-runtime*) continue ;; esac
    "$python" - "${AREAL_SKY_RAY_VERSION:-@ray@}" <<'AREAL_SKY_PY' 2>/dev/null && echo "$python" && return
import sys
from importlib.metadata import version
minor = version("ray").split(".")[:2]
sys.exit(sys.version_info < (3, 11) or minor != sys.argv[1].split(".")[:2])
AREAL_SKY_PY
  done
  return 0
}

areal_sky_pip() { # arguments of `pip install`, into $venv
  if "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
  elif command -v uv >/dev/null; then
    uv pip install --quiet --python "$venv/bin/python" "$@"
  else
    areal_sky_fail "neither pip nor uv is here to install: $*"
  fi
}

# A venv in which everything of $base can be imported too.
areal_sky_venv_on() {
  "$base" -m venv --without-pip --clear "$venv" || return
  "$base" - "$venv" <<'AREAL_SKY_PY'
import sys, sysconfig
from pathlib import Path
if sys.version_info < (3, 11):
    sys.exit(f"areal_sky: {sys.executable} is Python {sys.version.split()[0]}; 3.11 or newer is needed")
seen = [p for p in sys.path if p.endswith(("site-packages", "dist-packages"))]
own = Path(sysconfig.get_path("purelib", vars={"base": sys.argv[1]}, scheme="venv"))
(own / "_machine.pth").write_text("".join(f"import site; site.addsitedir({p!r})\n" for p in seen))
AREAL_SKY_PY
}

# Unpacks a wheel, and prints what areal_sky needs beyond what can be imported already: one requirement a line.
areal_sky_unpack() {
  "$venv/bin/python" - "$1" "${AREAL_SKY_RAY_VERSION:-@ray@}" <<'AREAL_SKY_PY'
import sys, sysconfig, zipfile
from email.parser import Parser
from importlib.metadata import PackageNotFoundError, version
wheel, ray = zipfile.ZipFile(sys.argv[1]), sys.argv[2]
wheel.extractall(sysconfig.get_path("purelib"))
name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
try:
    from packaging.requirements import Requirement
except ImportError:  # no Ray here either: all of it is asked for
    Requirement = None
for text in Parser().parsestr(wheel.read(name).decode()).get_all("Requires-Dist", []):
    if "extra ==" in text:
        continue
    needs = Requirement(text) if Requirement else None
    try:
        unmet = needs is None or not needs.specifier.contains(version(needs.name), prereleases=True)
    except PackageNotFoundError:
        unmet = True
    if unmet and (needs is None or needs.marker is None or needs.marker.evaluate()):
        print(f"ray=={ray}" if text.startswith("ray") else text)
AREAL_SKY_PY
}

areal_sky_install() {
  local package base key venv missing script
  package=${AREAL_SKY_PACKAGE/#\~/$HOME}
  if [ -z "$package" ]; then
    command -v areal-sky >/dev/null || areal_sky_fail "AREAL_SKY_PACKAGE is empty and this image has no areal-sky"
    return
  fi
  case $package in */*.whl) [ -f "$package" ] || areal_sky_fail "no $package; was it mounted?" || return ;; esac
  base=$(areal_sky_base) || return
  mkdir -p -m 700 "$HOME/.areal_sky" && mkdir -p "$HOME/.areal_sky/bin" || return
  # Nodes may share this home folder; the second one finds the work done.
  exec 9>"$HOME/.areal_sky/install.lock"
  if command -v flock >/dev/null; then flock 9; fi
  key="$base $package ${AREAL_SKY_RAY_VERSION:-@ray@}"
  if [ -f "$package" ]; then key="$key $(sha256sum <"$package")"; fi
  key=$(sha256sum <<<"$key" | cut -c 1-12)
  venv="$HOME/.areal_sky/venv-$key"
  if [ ! -e "$venv/ready" ]; then
    if [ -n "$base" ]; then
      areal_sky_venv_on || return
    elif command -v uv >/dev/null; then
      uv venv --quiet --python-preference only-managed --python @python@ "$venv" ||
        uv venv --quiet --python '>=3.11' "$venv" || return
    else
      python3 -m venv "$venv" || return
    fi
    if [ -f "$package" ]; then
      missing=$(areal_sky_unpack "$package") || return
      # Requirements hold spaces and `<`, never quotes: one argument a line.
      if [ -n "$missing" ]; then
        readarray -t missing <<<"$missing"
        areal_sky_pip "${missing[@]}" || areal_sky_fail "could not install ${missing[*]}" || return
      fi
    else
      areal_sky_pip "$package" "ray==${AREAL_SKY_RAY_VERSION:-@ray@}" || return
    fi
    for script in areal-sky:areal_sky.ui.cli.main ray:ray.scripts.scripts; do
      printf '#!%s\nimport sys\nfrom %s import main\nsys.exit(main())\n' "$venv/bin/python" "${script#*:}" \
        >"$venv/bin/${script%:*}" && chmod 755 "$venv/bin/${script%:*}" || return
    done
    "$venv/bin/areal-sky" --version >/dev/null || return
    # Tasks then find `python` where the machine has it, and this one only after it.
    if [ -z "$base" ]; then touch "$venv/apart"; fi
    touch "$venv/ready"
  fi
  ln -sfn "$venv/bin/areal-sky" "$HOME/.areal_sky/bin/areal-sky"
  areal_sky_say "$("$venv/bin/python" -V) of ${base:-its own}, in $venv"
}

areal_sky_install
areal_sky_code=$?
exec 9>&-
if [ "$areal_sky_code" -ne 0 ]; then
  areal_sky_say "could not install ${AREAL_SKY_PACKAGE:-}; Python 3.11 or newer is needed, or uv"
  exit "$areal_sky_code"
fi
"""


def install_script() -> str:
    """Constant text; what it installs comes from AREAL_SKY_PACKAGE, _PYTHON and _RAY_VERSION in the environment."""
    return _INSTALL.lstrip().replace("@ray@", RAY_VERSION).replace("@python@", UV_PYTHON)
