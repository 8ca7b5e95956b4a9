"""The property of run/simulation/histories.py over `HISTORIES` seeds. A failing seed is told, shrunk, on stderr."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

from areal_sky.run.simulation.histories import live, random_history, shrunk

HISTORIES = 1000


def measure(histories: int = HISTORIES) -> dict[str, Any]:
    """`events`: records written by controllers and task services; `faults`: calls that a fault befell; CPU seconds."""
    logging.disable(logging.CRITICAL)
    started = time.process_time()
    events = faults = violations = 0
    try:
        for seed in range(histories):
            outcome = live(random_history(seed))
            events += outcome.events
            faults += outcome.faults
            if outcome.violation:
                violations += 1
                history = shrunk(random_history(seed))
                print(f"seed {seed}: {live(history).violation}\n  {history}", file=sys.stderr)
    finally:
        logging.disable(logging.NOTSET)
    return {
        "histories": histories, "events": events, "faults": faults, "violations": violations,
        "cpu_s": time.process_time() - started,
    }  # fmt: skip
