"""Gives a machine back when its part is over and nobody else would: a forgotten one must not cost anything.

On clouds SkyPilot's autostop does that once the task has ended; on Slurm it cannot, and the job would idle on to its
time limit.
"""

from __future__ import annotations

import logging
import shutil
import subprocess
from collections.abc import Mapping

log = logging.getLogger(__name__)


def give_back(environ: Mapping[str, str]) -> bool:
    """Ends the Slurm job that this machine's SkyPilot cluster is, all its nodes; False where there is none to end."""
    job = environ.get("SLURM_JOB_ID", "")
    scancel = shutil.which("scancel", path=environ.get("PATH"))
    # Somebody's own job in which areal_sky was started by hand is not ours to end.
    if not (job.isdigit() and environ.get("SKYPILOT_TASK_ID") and scancel):
        return False
    log.warning("ending Slurm job %s: nobody needs this machine any more", job)
    try:
        done = subprocess.run([scancel, job], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as e:
        log.error("scancel %s: %s", job, e)
        return False
    if done.returncode != 0:
        log.error("scancel %s: %s", job, done.stderr.strip())
    return done.returncode == 0
