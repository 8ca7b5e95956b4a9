#!/bin/bash
# Installs the Debian packages that the testbed needs and this machine lacks. Says what it will do before it does it.
# Where it cannot (not root, no apt-get), it says what is missing; the tests are skipped there with the same words.
set -euo pipefail

declare -A package=(
  [slurmctld]=slurmctld [slurmd]=slurmd [sinfo]=slurm-client [munged]=munge [sshd]=openssh-server [ssh]=openssh-client
  [socat]=socat [rsync]=rsync [ip]=iproute2 [unshare]=util-linux [nsenter]=util-linux [curl]=curl [ps]=procps
)
export PATH=$PATH:/usr/sbin:/sbin
missing=()
for tool in "${!package[@]}"; do
  command -v "$tool" >/dev/null || missing+=("${package[$tool]}")
done
[ ${#missing[@]} -gt 0 ] || exit 0
mapfile -t missing < <(printf '%s\n' "${missing[@]}" | sort -u)

if [ "${1:-}" = --list ]; then echo "${missing[*]}"; exit 0; fi
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
  echo "testbed: missing ${missing[*]}; install them as root (apt-get install ${missing[*]}), else its tests are skipped" >&2
  exit 0
fi
echo "testbed: installing Debian packages for a local Slurm cluster: ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
# The testbed starts its own daemons; the packages must not start theirs on this machine.
if [ ! -e /usr/sbin/policy-rc.d ]; then
  printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d
  chmod 755 /usr/sbin/policy-rc.d
  trap 'rm -f /usr/sbin/policy-rc.d' EXIT
fi
install=(apt-get install -y -qq --no-install-recommends "${missing[@]}")
log=$(mktemp)
if ! "${install[@]}" >"$log" 2>&1 && ! { apt-get update -qq && "${install[@]}"; } >"$log" 2>&1; then
  cat "$log" >&2
  exit 1
fi
rm -f "$log"
