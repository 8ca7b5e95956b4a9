"""The memory that tasks' GPUs were seen to hold: a metric of theirs, and what it teaches (core/memory_peaks.py)."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from areal_sky.core.memory_check import KIND_STAGE
from areal_sky.core.memory_peaks import Peak, corrections
from areal_sky.core.memory_terms import Stage
from areal_sky.core.nodeenv import HeadEnv
from areal_sky.core.tasklife import TaskRecord
from areal_sky.run.metricbook import MetricBook
from areal_sky.run.nodebook import LoadSource

METRIC = "gpu_memory_peak_gib"  # of the GPU that held most
RECENT = 200  # attempts


class PeakBook:
    """For the threads of one process, which share one lock outside. A new process learns anew."""

    def __init__(self, env: HeadEnv, hub: LoadSource | None, metrics: MetricBook):
        # Pretend GPUs of this machine hold nothing.
        self._needs = {} if env.shape is not None else {(n.model, n.stage): n for n in env.needs}
        self._hub, self._metrics = hub, metrics
        self._peaks: deque[Peak] = deque(maxlen=RECENT)

    def left(self, r: TaskRecord, now_s: float) -> None:
        """An attempt of the task is over."""
        seen = self._hub.peak_memory_gib(r.task_id, r.started_s or now_s) if self._hub is not None else None
        if seen is None:
            return
        self._metrics.take(r.task_id, r.attempt, {METRIC: seen}, now_s)
        stage = KIND_STAGE.get(r.spec.kind)
        need = self._needs.get((r.spec.model or "", stage)) if stage is not None else None
        if need is not None and r.spec.bundle.gpus >= 1:
            oom = any(e.oom == "gpu" for e in r.exits)
            self._peaks.append(Peak(need.model, need.stage, need.device_gib, seen, oom))

    def corrections(self) -> Mapping[tuple[str, Stage], float]:
        """The factor on the estimates of each (model, stage) that was seen."""
        return corrections(self._peaks)
