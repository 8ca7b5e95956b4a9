"""Elastic, cost-aware Ray clusters for reinforcement learning of large language models.

    from areal_sky import Cluster, Task

    cluster = Cluster.up("cluster.yaml")
    task = cluster.submit(Task("python train.py", kind="train", gpus=8))

The names below are the public API. They load on first use, so that `areal-sky --help` need not pay for them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal_sky.alerts import AlertManager
    from areal_sky.cluster import Cluster
    from areal_sky.task import (
        Task,
        TaskHandle,
        TaskScheduler,
        TaskStatus,
        checkpointed,
        low_phase,
        track_runtime_metrics,
    )
    from areal_sky.telemetry import get_gpu_utilization

__all__ = [
    "AlertManager", "Cluster", "Task", "TaskHandle", "TaskScheduler", "TaskStatus", "checkpointed",
    "get_gpu_utilization", "low_phase", "track_runtime_metrics",
]  # fmt: skip
_HOMES = {
    "AlertManager": "areal_sky.alerts", "Cluster": "areal_sky.cluster", "get_gpu_utilization": "areal_sky.telemetry",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES.get(name, "areal_sky.task")), name)
