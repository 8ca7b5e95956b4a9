#!/bin/bash
# Writes every file that the testbed's hosts and SkyPilot's client read. Starts nothing.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"

mkdir -p "$TB_DIR"/{pids,log,bin,gpu,hosts,etc/slurm,etc/munge,etc/ssh,slurm/state,slurm/spool,home/.ssh,uv-cache} \
  "$TB_HOME"/{.slurm,.ssh}
chmod 700 "$TB_DIR"/etc/munge "$TB_DIR"/home/.ssh "$TB_HOME"/.ssh
(umask 077; head -c 1024 /dev/urandom >"$TB_DIR/etc/munge/key")

# As on real clusters, the end of a job step kills all that it started, where the kernel's cgroups (v1) let Slurm see it.
if [ -z "$TB_PROCTRACK" ]; then
  TB_PROCTRACK=linuxproc
  probe=/sys/fs/cgroup/freezer/$TB_PREFIX-probe
  if mkdir "$probe" 2>/dev/null; then rmdir "$probe"; TB_PROCTRACK=cgroup; fi
fi

cat >"$TB_DIR/etc/slurm/slurm.conf" <<CONF
ClusterName=$TB_CLUSTER
SlurmctldHost=login($TB_NET.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$TB_DIR/etc/munge/socket
CryptoType=crypto/munge
StateSaveLocation=$TB_DIR/slurm/state
SlurmdSpoolDir=$TB_DIR/slurm/spool/%n
SlurmctldPidFile=$TB_DIR/slurm/slurmctld.pid
SlurmdPidFile=$TB_DIR/slurm/slurmd.%n.pid
SlurmctldLogFile=$TB_DIR/log/slurmctld.log
SlurmdLogFile=$TB_DIR/log/slurmd.%n.log
ProctrackType=proctrack/$TB_PROCTRACK
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
GresTypes=gpu
ReturnToService=2
# the numbers below are taken as they are, whatever this machine has
SlurmdParameters=config_overrides
# quick to react: this is for tests
SchedulerParameters=sched_interval=2,sched_min_interval=0
SlurmdTimeout=30
KillWait=5
MinJobAge=60
NodeName=$TB_PREFIX[1-$TB_NODES] CPUs=$TB_CPUS RealMemory=$TB_MEMORY_MB Gres=gpu:$TB_GPU_TYPE:$TB_GPUS State=UNKNOWN
# a job of partition "spot" is cancelled when one of partition "gpu" needs its nodes
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
PartitionName=gpu Nodes=ALL Default=YES MaxTime=7-00:00:00 State=UP PriorityTier=10 PreemptMode=OFF
PartitionName=spot Nodes=ALL MaxTime=7-00:00:00 State=UP PriorityTier=1
CONF
cat >"$TB_DIR/etc/slurm/cgroup.conf" <<CONF
CgroupPlugin=cgroup/v1
CgroupMountpoint=/sys/fs/cgroup
CONF
# slurmd counts GPUs by their device files. With the numbers of real ones it sets CUDA_VISIBLE_DEVICES; nothing is behind them.
for i in $(seq 0 $((TB_GPUS - 1))); do
  mknod "$TB_DIR/gpu/gpu$i" c 195 "$i" || fail "cannot make device files here (mknod): is this an unprivileged container?"
done
printf 'AutoDetect=off\nName=gpu Type=%s File=%s\n' "$TB_GPU_TYPE" "$TB_DIR/gpu/gpu[0-$((TB_GPUS - 1))]" \
  >"$TB_DIR/etc/slurm/gres.conf"

# Names and root's home are the same on every host: the home stands for the network disk that all nodes share.
{ echo "127.0.0.1 localhost"; echo "$TB_NET.1 login"
  for i in $(seq "$TB_NODES"); do echo "$TB_NET.$((10 + i)) $TB_PREFIX$i"; done
} >"$TB_DIR/etc/hosts"
sed "s#^root:.*#root:x:0:0:root:$TB_DIR/home:/bin/bash#" /etc/passwd >"$TB_DIR/etc/passwd"

# Environment of whoever comes in on the login host; srun and sbatch hand it to the nodes.
echo "$TB_DIR/bin:$TB_DIR/image/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin" >"$TB_DIR/etc/path"
cat >"$TB_DIR/etc/environment" <<CONF
export PATH=$(cat "$TB_DIR/etc/path")
export UV_OFFLINE=1 UV_PYTHON_DOWNLOADS=never
export RAY_DISABLE_MEMORY_MONITOR=1 RAY_USAGE_STATS_ENABLED=0
CONF
echo ". $TB_DIR/etc/environment" >"$TB_DIR/home/.bashrc"   # SkyPilot appends to this one
echo '. ~/.bashrc' >"$TB_DIR/home/.bash_profile"

# ssh: the login host's own key, and the key that SkyPilot comes with
ssh-keygen -q -t ed25519 -N '' -f "$TB_DIR/etc/ssh/host_key"
ssh-keygen -q -t ed25519 -N '' -f "$TB_HOME/.ssh/testbed"
cp "$TB_HOME/.ssh/testbed.pub" "$TB_DIR/home/.ssh/authorized_keys"
cat >"$TB_DIR/etc/ssh/sshd_config" <<CONF
HostKey $TB_DIR/etc/ssh/host_key
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
PrintMotd no
PrintLastLog no
MaxSessions 200
Subsystem sftp internal-sftp
CONF
cat >"$TB_HOME/.slurm/config" <<CONF
Host $TB_CLUSTER
    HostName 127.0.0.1
    Port $TB_PORT
    User root
    IdentityFile $TB_HOME/.ssh/testbed
    IdentitiesOnly yes
CONF

# The nodes' software: uv for SkyPilot's set-up, and an image with Ray but without areal_sky and SkyPilot.
install -m 755 "$here/shims/curl" "$TB_DIR/bin/curl"
sed "s#^args=()#TB_VENV=$TB_VENV TB_TOOLS=$here\n&#" "$here/shims/uv" >"$TB_DIR/bin/uv"
chmod 755 "$TB_DIR/bin/uv"
"$TB_VENV/bin/python" "$here/software.py" image "$TB_DIR/image"
"$TB_VENV/bin/python" "$here/software.py" catalog "$TB_HOME" "$TB_GPU_TYPE"
