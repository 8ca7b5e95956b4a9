#!/bin/sh
# make-venv.sh PYTHON DIR: a virtual environment, also where Debian has split ensurepip off Python.
set -eu
python=$1
venv=$2

[ -x "$venv/bin/pip" ] && exit 0

if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    package=python3-venv
    [ "$("$python" -c 'import sys; print(sys.executable)')" = "/usr/bin/python$version" ] && package="python$version-venv"
    if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null 2>&1; then
        echo "installing $package: this Python has no ensurepip"
        export DEBIAN_FRONTEND=noninteractive
        apt-get install -y -qq "$package" >/dev/null 2>&1 ||
            { apt-get update -qq && apt-get install -y -qq "$package" >/dev/null; }
    else
        echo "error: this Python cannot make virtual environments; install it first:" >&2
        echo "    sudo apt-get install $package" >&2
        exit 1
    fi
fi

rm -rf "$venv"
"$python" -m venv "$venv"
