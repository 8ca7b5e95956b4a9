"""SkyPilot's API server on this machine: started where nothing listens on its port, and only then.

Left to itself the SDK starts one whenever a health check fails. A server that is merely slow fails it too, and the
second server that comes up then clears the first one's requests, launches in flight included.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
from urllib.parse import urlsplit

from areal_sky.errors import Unreachable

log = logging.getLogger(__name__)
# SkyPilot's own switch (sky/utils/env_options.py, 0.14); its error names it.
FORBID = "SKYPILOT_DISABLE_LOCAL_API_SERVER"
_BY_US = "AREAL_SKY_STARTS_API_SERVER"  # tells our own setting, which child processes inherit, from the user's
START_S = 120.0  # 17 s on a quiet machine with two cores
_START = "from sky.client import sdk; sdk.api_start()"

_lock = threading.Lock()


def forbid_autostart() -> None:
    """From here on the SDK of this process raises where it would have started a server. Harmless when repeated."""
    if os.environ.get(FORBID, "").lower() not in ("1", "true"):
        os.environ |= {FORBID: "1", _BY_US: "1"}


def is_missing(error: BaseException) -> bool:
    """Whether the SDK failed since it found no healthy server and may not start one."""
    return FORBID in str(error)


def start_if_gone(url: str) -> None:
    """Starts a local server where nothing listens at `url`.

    Raises Unreachable: the server there is only slow, the user forbids starting one, or it did not start.
    """
    if _listens(url):
        raise Unreachable(f"SkyPilot's API server at {url} is too busy to answer")
    if _BY_US not in os.environ:
        raise Unreachable(f"no SkyPilot API server at {url}, and {FORBID} forbids starting one (`sky api login`)")
    with _lock:
        if _listens(url):
            return  # another thread was first
        log.info("no SkyPilot API server at %s: starting it", url)
        env = {k: v for k, v in os.environ.items() if k not in (FORBID, _BY_US)}
        try:
            done = subprocess.run(
                [sys.executable, "-c", _START], env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE, text=True, timeout=START_S, start_new_session=True,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise Unreachable(f"SkyPilot's API server did not start within {START_S:g} s") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise Unreachable(f"SkyPilot's API server did not start: {last[:300]} (`sky api start` says more)")


def _listens(url: str) -> bool:
    where = urlsplit(url)
    with socket.socket() as s:
        s.settimeout(5)
        try:
            return s.connect_ex((where.hostname or "127.0.0.1", where.port or 46580)) == 0
        except OSError:
            return True  # no answer within the time: rather too busy than gone
