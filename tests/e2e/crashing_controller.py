"""A controller that is killed by SIGKILL at one exact point: `crashing_controller.py CLUSTER POINT REPLICA`."""

from __future__ import annotations

import os
import signal
import sys
import threading

from areal_sky.adapters.local import LocalCloud
from areal_sky.home import ClusterHome
from areal_sky.run.headlink import HeadLink
from areal_sky.run.supervise import run_controller

NAME, POINT, REPLICA = sys.argv[1:]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Crashing:
    """Wraps a method: dies before or after the real call for the chosen replica."""

    def __init__(self, owner: type, method: str, point: str):
        real = getattr(owner, method)

        def wrapped(self: object, first: object, *rest: object) -> object:
            hit = getattr(first, "replica", first) == REPLICA
            if hit and f"before-{point}" == POINT:
                die()
            result = real(self, first, *rest)
            if hit and f"after-{point}" == POINT:
                die()
            return result

        setattr(owner, method, wrapped)


Crashing(LocalCloud, "launch", "launch")
Crashing(LocalCloud, "terminate", "terminate")
Crashing(HeadLink, "drain", "drain")
run_controller(ClusterHome(NAME), threading.Event())
