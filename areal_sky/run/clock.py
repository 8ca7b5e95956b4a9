"""The machine's clock, behind the port that tests and simulations replace."""

from __future__ import annotations

import time


class SystemClock:
    """`ports.Clock`."""

    def now(self) -> float:
        """Unix time in seconds."""
        return time.time()
