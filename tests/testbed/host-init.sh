#!/bin/bash
# The first process (pid 1) of one host, already inside its namespaces. When it ends, the host ends.
set -eu
name=$1
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"
hostname "$name"
mount --make-rprivate /
mount --bind "$TB_DIR/etc/hosts" /etc/hosts
mount --bind "$TB_DIR/etc/passwd" /etc/passwd
mount --bind "$TB_DIR/etc/slurm" /etc/slurm

# /tmp is the host's own, with the folders that all hosts share still at their places in it.
tmp=$TB_DIR/hosts/$name/tmp
rm -rf "$tmp"
mkdir -p "$tmp/uv_cache_0"
chmod 1777 "$tmp"
mount --bind "$TB_DIR/uv-cache" "$tmp/uv_cache_0"          # where SkyPilot's set-up of a node points uv
for dir in "$TB_DIR" "$root" "$TB_VENV" $TB_SHARE; do
  case $dir in /tmp/*) mkdir -p "$tmp${dir#/tmp}" && mount --bind "$dir" "$tmp${dir#/tmp}" ;; esac
done
mount --rbind "$tmp" /tmp
mount -t tmpfs -o "size=$TB_SHM,mode=1777" tmpfs /dev/shm
mount -t tmpfs -o size=16m,mode=755 tmpfs /run
mkdir /run/sshd                            # nodes too: SkyPilot starts an sshd inside a job

# As on a machine just booted: nothing of the environment that the testbed was started from.
state=$TB_DIR
export HOME=$state/home USER=root LOGNAME=root SHELL=/bin/bash
for variable in $(compgen -e); do
  case $variable in HOME | USER | LOGNAME | SHELL | LANG | TB_MARK) ;; *) unset "$variable" || true ;; esac
done
. "$state/etc/environment"
cd /
if [ "$name" = login ]; then
  munge=$state/etc/munge
  munged --force --key-file="$munge/key" --socket="$munge/socket" --pid-file="$munge/pid" \
    --log-file="$munge/log" --seed-file="$munge/seed"
  slurmctld -D -i &
else
  until [ -S "$state/etc/munge/socket" ]; do sleep 0.1; done
  slurmd -D -N "$name" &
fi
wait $!                                    # stays as pid 1: bash reaps orphans, and ends with its daemon
