"""The agent of a node: samples its GPUs, makes 1 s windows of them, ships these to the head. No Ray in it.

`step` and `heartbeat_body` hold the logic and take the time as an argument; `run` is the loop around them.
How often to read is `core/sampling.py`; the head says how often to post, and a window with bad news is posted at once.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from areal_sky.adapters.hostmemory import MemoryUse, memory_use
from areal_sky.adapters.lanes import in_relays
from areal_sky.adapters.ports import GpuReader
from areal_sky.adapters.processes import settle
from areal_sky.adapters.simulated_gpus import RunningRank, SimulatedGpuReader, marks, running_ranks
from areal_sky.core.model import NodeShape
from areal_sky.core.nodeenv import NodeEnv
from areal_sky.core.sampling import MAX_BEAT_S, SamplingContext, choose_sampling
from areal_sky.core.telemetry import GpuSample, GpuWindow, Validity, windows
from areal_sky.core.windowcodec import to_wire
from areal_sky.errors import ArealSkyError

log = logging.getLogger(__name__)

WINDOW_S = 1.0
HEARTBEAT_S = 1.0
MEMORY_S = 10.0  # how often the machine's memory is looked at
BAD = (Validity.LOST, Validity.STALE)
BRIEF_S = 0.15  # so long the end may wait
BUFFER_S = 300  # windows kept while the head does not answer
WINDOWS_PER_POST = 1000  # about 200 kB: catching up after an outage must not be one huge request

Post = Callable[[dict[str, Any]], Mapping[str, Any]]


def open_node_reader(env: NodeEnv) -> tuple[GpuReader | None, str]:
    """The reader for this node's GPUs and "", or None and why there is none."""
    if env.simulated_gpus:
        return SimulatedGpuReader(Path(env.state_dir).expanduser(), env.shape or NodeShape()), ""
    from areal_sky.adapters import nvml

    return nvml.open_reader()


def connect(env: NodeEnv, token: str, raylet_alive: Callable[[], bool] = lambda: True) -> Agent:
    """The agent of this node, posting to the gateway of its head with the node token."""
    from areal_sky.adapters.headpost import HeadPost

    reader, why_not = open_node_reader(env)
    if why_not:
        log.warning("no GPU telemetry: %s", why_not)
    head = HeadPost(env.head_ip, env.gateway_port, token)
    memory = None if env.simulated_gpus else memory_use  # pretend nodes share the memory of one machine
    return Agent(env, reader, head.heartbeat, no_reader_reason=why_not, raylet_alive=raylet_alive, memory=memory)


class Agent:
    """Samples on a drift-free schedule. Each window has one rate, chosen when it starts (`choose_sampling`).

    `post` sends a heartbeat and returns the head's answer (`HeadPost.heartbeat`); it may raise ArealSkyError.
    `no_reader_reason` says why `reader` is None. `raylet_alive` is asked at each heartbeat, `memory` each 10 s.
    `wall` is Unix time, `monotonic` measures the lease: a corrected clock must not end a machine.
    """

    def __init__(
        self,
        env: NodeEnv,
        reader: GpuReader | None,
        post: Post,
        *,
        no_reader_reason: str = "",
        raylet_alive: Callable[[], bool] = lambda: True,
        memory: Callable[[], MemoryUse | None] | None = None,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ):
        self._env = env
        self._reader = reader
        self._post = post
        self._why_blind = no_reader_reason
        self._raylet_alive = raylet_alive
        self._memory = memory
        self._memory_told_s = float("-inf")  # monotonic
        self._wall = wall
        self._monotonic = monotonic
        self._node_dir = Path(env.state_dir).expanduser()

        self._expected_gpus = math.ceil(env.shape.gpus) if env.shape else 0
        self._interval_s = env.normal_interval_s
        self._samples: list[GpuSample] = []
        self._window_start_s: float | None = None
        self._next_s = 0.0
        self._bad: frozenset[int] = frozenset()  # devices that were lost or silent when last read
        self._ordered: str | None = None

        self._lock = threading.Lock()
        self._unsent: deque[GpuWindow] = deque(maxlen=BUFFER_S * max(1, self._expected_gpus or 8))
        self._running: tuple[RunningRank, ...] = ()
        self._latest: dict[int, GpuWindow] = {}  # of each GPU
        self._dropped = 0  # windows that fell out of the full buffer unsent
        self._urgent = threading.Event()

        self.beat_s = HEARTBEAT_S
        self.lease_s = env.lease_s
        self.last_ok_s: float | None = None
        self.last_error = ""
        self._last_ok_monotonic = monotonic()

    # ------------------------------------------------------------ sampling

    @property
    def next_s(self) -> float:
        """When the next sample is due; 0 before the first step."""
        return self._next_s

    @property
    def interval_s(self) -> float:
        """The sampling interval of the window that is open now."""
        return self._interval_s

    def step(self, now_s: float) -> tuple[GpuWindow, ...]:
        """Take the sample if it is due; returns the windows that it completed (one per GPU), kept for sending too."""
        if self._window_start_s is None or now_s < self._window_start_s:  # the first step, or the clock was set back
            self._open_window(now_s)
            return ()
        if now_s < self._next_s - 1e-6:
            return ()
        news = self._read(now_s)
        self._samples.extend(news)
        late = math.floor((now_s - self._next_s) / self._interval_s + 1e-6)  # samples that were slept through
        due_s = self._next_s + late * self._interval_s
        self._next_s = due_s + self._interval_s
        bad = frozenset(s.device for s in news if s.validity in BAD)
        struck = bad - self._bad or any(s.xid is not None for s in news)
        self._bad = bad
        if struck:  # the head should know now, not when the window would end
            self._urgent.set()
        elif self._next_s <= self._window_start_s + WINDOW_S + 1e-6:
            return ()
        return self._close_window(due_s if struck else max(self._window_start_s + WINDOW_S, due_s))

    def _open_window(self, start_s: float) -> None:
        self._window_start_s = start_s
        self._samples = []
        running = running_ranks(self._node_dir)
        marked = marks(self._node_dir)
        env = self._env
        context = SamplingContext(
            kinds=tuple(r.kind for r in running),
            marked=tuple(r.task_id for r in running if r.task_id in marked),
            ordered=self._ordered,
            critical_interval_s=env.critical_interval_s,
            normal_interval_s=env.normal_interval_s,
        )
        decision = choose_sampling(context)
        if decision.interval_s != self._interval_s:
            log.info("GPUs are read every %g s: %s", decision.interval_s, decision.reason)
        self._interval_s = decision.interval_s
        self._next_s = start_s + self._interval_s
        with self._lock:
            self._running = running

    def _close_window(self, end_s: float) -> tuple[GpuWindow, ...]:
        start_s = self._window_start_s or 0.0
        expected = max(1, round((end_s - start_s) / self._interval_s))
        ready = windows(self._samples, start_s, end_s, expected)
        with self._lock:
            self._dropped += max(0, len(self._unsent) + len(ready) - (self._unsent.maxlen or 0))
            self._unsent.extend(ready)
            self._latest.update((w.device, w) for w in ready)
        self._open_window(end_s)
        return ready

    def _read(self, now_s: float) -> tuple[GpuSample, ...]:
        if self._reader is None:
            return ()
        try:
            samples = tuple(self._reader.read(now_s))
        except Exception as e:  # a reader must not raise; if one does, the node goes on without its numbers
            self._note(f"cannot read the GPUs: {e}")
            return ()
        self._note("")
        if not self._env.shape:
            self._expected_gpus = max(self._expected_gpus, len(samples))
        return samples

    def _note(self, why_blind: str) -> None:
        if why_blind != self._why_blind:
            self._why_blind = why_blind
            if why_blind:
                log.warning(why_blind)

    # ------------------------------------------------------------ shipping

    def heartbeat_body(self, now_s: float, leaving: bool = False) -> dict[str, Any]:
        """What the head is told at `now_s`: who we are, what runs here, and the oldest windows not yet sent.

        `leaving` is said once, at an orderly end: the head then forgets the node at once.
        """
        with self._lock:
            unsent = [w for _, w in zip(range(WINDOWS_PER_POST), self._unsent, strict=False)]
        return self._body(now_s, unsent, leaving)

    def known(self, now_s: float) -> dict[str, Any]:
        """The same with the latest window of each GPU, whatever has been sent: all that is known of this node now."""
        with self._lock:
            latest = [w for _, w in sorted(self._latest.items())]
        return self._body(now_s, latest)

    def _body(self, now_s: float, told: list[GpuWindow], leaving: bool = False) -> dict[str, Any]:
        with self._lock:
            running, dropped = self._running, self._dropped
        return {
            "cluster": self._env.cluster,
            "group": self._env.group,
            "replica": self._env.replica,
            "index": self._env.index,
            "t_s": now_s,
            "pid": os.getpid(),
            "raylet_alive": self._raylet_alive(),
            "gpus": self._expected_gpus,
            "interval_s": self._interval_s,
            "telemetry_error": self._why_blind,
            "running": [
                {"task_id": r.task_id, "rank": r.rank, "kind": r.kind, "gpus": list(r.gpus)} for r in running
            ],
            "dropped": dropped,
            "windows": to_wire(told),
            "leaving": leaving,
        }

    def beat(self, now_s: float, leaving: bool = False) -> bool:
        """Post one heartbeat; False when the head did not take it (its windows are kept for the next one)."""
        body = self.heartbeat_body(now_s, leaving) | self._memory_news()
        try:
            answer = self._post(body)
        except ArealSkyError as e:
            if str(e) != self.last_error:
                log.warning("heartbeat: %s", e)
            self.last_error = str(e)
            return False
        self.last_error = ""
        self.last_ok_s = now_s
        self._last_ok_monotonic = self._monotonic()
        lease_s = answer.get("lease_s")
        if isinstance(lease_s, int | float) and lease_s > 0:
            self.lease_s = float(lease_s)
        beat_s = answer.get("beat_s")
        if isinstance(beat_s, int | float):
            self.beat_s = min(MAX_BEAT_S, max(HEARTBEAT_S, float(beat_s)))
        ordered = answer.get("sampling")
        self._ordered = ordered if isinstance(ordered, str) else None
        self._forget_sent(len(body["windows"]["each"]["device"]), body["dropped"])
        return True

    def _memory_news(self) -> dict[str, Any]:
        if self._memory is None or self._monotonic() - self._memory_told_s < MEMORY_S:
            return {}
        self._memory_told_s = self._monotonic()
        return {"memory": self._memory()}

    def lease_left_s(self) -> float:
        """Seconds until this node must end itself, since no head has answered; negative when overdue."""
        return self.lease_s - (self._monotonic() - self._last_ok_monotonic)

    def _forget_sent(self, sent: int, dropped_before: int) -> None:
        with self._lock:
            # The oldest may have fallen out of the full buffer while we posted.
            for _ in range(min(len(self._unsent), max(0, sent - (self._dropped - dropped_before)))):
                self._unsent.popleft()

    # ------------------------------------------------------------ the loop

    def run(self, stop: threading.Event) -> None:
        """Sample in one thread and post in another, so that a slow head delays no sample. Returns after `stop`."""
        poster = threading.Thread(target=self._post_until, args=(stop,), name="agent-heartbeat", daemon=True)
        poster.start()
        settle()
        try:
            in_relays(lambda: self._sample_until(stop), self._reader.relieve if self._reader else lambda: False)
        finally:
            stop.set()
            self._urgent.set()
            poster.join(timeout=2.0)
            if self._reader is not None:
                self._reader.close()

    def _sample_until(self, stop: threading.Event) -> None:
        while not stop.is_set():
            self.step(self._wall())
            # Never longer than a second, so that a clock that was set back is noticed.
            pause_s = min(1.0, max(0.001, self._next_s - self._wall()))
            if pause_s < BRIEF_S:
                time.sleep(pause_s)  # waiting for `stop` costs more, and this is what mostly happens
            else:
                stop.wait(pause_s)

    def _post_until(self, stop: threading.Event) -> None:
        due = self._monotonic()
        while not stop.is_set():
            try:
                self.beat(self._wall())
            except Exception:  # a broken answer must not silence the node for ever
                log.exception("heartbeat failed")
            now = self._monotonic()
            every_s = self.beat_s if not self._backlog() else HEARTBEAT_S
            due = due + every_s if due + every_s > now else now + every_s
            self._urgent.wait(due - now)
            self._urgent.clear()
        try:
            self.beat(self._wall(), leaving=True)
        except Exception:
            log.debug("could not say goodbye", exc_info=True)

    def _backlog(self) -> bool:
        with self._lock:
            return len(self._unsent) > WINDOWS_PER_POST
