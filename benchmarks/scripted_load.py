"""A training gang on one node as its telemetry looks, second by second, with faults that can be scripted into it.

Made up after what such series look like: steps of unequal length with a dip of the load between them, checkpoints that
keep the GPUs idle for some seconds, evaluations that are announced as a low phase, sawteeth and plateaus of memory,
readings that are missing now and then, reports that come late. Everything is drawn from one seeded generator.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from areal_sky.core.alertrules import RuleWatch
from areal_sky.core.alerts import AlertBook, Change
from areal_sky.core.anomaly import Detector, Run
from areal_sky.core.heartbeat import HostMemory, RankOn
from areal_sky.core.telemetry import GpuWindow, Validity
from areal_sky.core.windowcodec import batch_of
from areal_sky.spec.cluster import AlertSpec

GPUS = 8
HOST_GIB = 1024.0
LOOK_S = 0.5
TASK, REPLICA = "t1", "c-main-0"


@dataclass
class Load:
    """What is true of the gang now; a fault changes it. Times in seconds, shares 0..1."""

    step_s: float = 2.0
    step_noise: float = 0.12  # sigma of a lognormal
    busy: float = 0.93
    dip_s: float = 0.3  # of each step
    checkpoint_every_s: float = 600.0
    checkpoint_s: float = 3.0
    eval_every_s: float = 900.0
    eval_s: float = 25.0
    missing: float = 0.01  # of readings
    memory_gib: float = 52.0
    celsius: float = 68.0
    stuck: bool = False  # no step ends
    spinning: bool = False  # and yet its GPUs are busy (a collective that waits)
    slow: dict[int, float] = field(default_factory=dict[int, float])  # rank -> times as long, in its own work
    synchronous: bool = True  # the ranks wait for the slowest at each step
    leak_gib_s: dict[int, float] = field(default_factory=dict[int, float])
    host_leak_gib_s: float = 0.0
    hot: dict[int, float] = field(default_factory=dict[int, float])  # GPU -> degrees more
    throttle: dict[int, str] = field(default_factory=dict[int, str])
    lost: set[int] = field(default_factory=set[int])
    xid: dict[int, int] = field(default_factory=dict[int, int])  # told once
    ecc: dict[int, int] = field(default_factory=dict[int, int])
    nan: bool = False


Fault = Callable[[Load], None]


class Gang:
    """The gang, its GPUs, and what watches them. `tick` advances by a second."""

    def __init__(self, seed: int, load: Load | None = None, rules: tuple[AlertSpec, ...] = ()):
        self.random = random.Random(seed)
        self.load = load or Load()
        self.detector = Detector()
        self.rules = RuleWatch(rules)
        self.book = AlertBook()
        self.phase = self.random.random()  # of the heartbeat within the second
        self.t_s = 1_700_000_000.0
        self.step = 0
        self._left_s = self._draw_step()
        self._checkpoint_s = self.load.checkpoint_every_s * (0.5 + self.random.random() / 2)
        self._eval_s = self.load.eval_every_s * (0.5 + self.random.random() / 2)
        self._pause_s = 0.0
        self._low_s = 0.0
        self._leaked = dict.fromkeys(range(GPUS), 0.0)
        self._sawtooth = 0.0
        self._host_leaked = 0.0
        self._host_random = random.Random(-1 - seed)

    def tick(self) -> list[tuple[float, Change]]:
        """One second later: (when, change) of every alert that was raised or has ended meanwhile."""
        start_s, self.t_s = self.t_s, self.t_s + 1.0
        idle_frac = self._work()
        windows = [self._window(g, start_s, idle_frac) for g in range(GPUS)]
        ranks = [RankOn(TASK, g, (g,)) for g in range(GPUS)]
        changes: list[tuple[float, Change]] = []
        arrives_s = self.t_s + self.phase
        self.detector.run([Run(TASK, 1, self._low_s > 0)], self.t_s)
        self._host_leaked += self.load.host_leak_gib_s
        memory = self._host_memory() if int(self.t_s) % 10 == 0 else None
        self.detector.heard(REPLICA, 0, ranks, batch_of(windows), memory)
        looks = [arrives_s] if any(w.validity is Validity.LOST for w in windows) else []
        looks += [self.t_s + LOOK_S * i for i in (1, 2) if self.t_s + LOOK_S * i >= arrives_s or i == 2]
        for look_s in looks[:2]:
            found = [*self.detector.findings(look_s), *self.rules.find(self.detector.devices(), {}, look_s)]
            changes += [(look_s, c) for c in self.book.update(self.rules.allowed(found, look_s), look_s)]
        return changes

    def _draw_step(self) -> float:
        step_s = self.load.step_s * math.exp(self.random.gauss(0, self.load.step_noise))
        if self.random.random() < 0.01:
            step_s *= 1.6  # a long sequence
        return step_s * (max(self.load.slow.values(), default=1.0) if self.load.synchronous else 1.0)

    def _work(self) -> float:
        """Works for a second and reports each step; the share of the second in which no GPU works."""
        load, left_s, idle_s = self.load, 1.0, 0.0
        if load.stuck:
            return 0.0 if load.spinning else 1.0
        while left_s > 1e-9:
            pause = "_low_s" if self._low_s > 0 else "_pause_s"
            if (pause_s := getattr(self, pause)) > 0:
                spent_s = min(left_s, pause_s)
                setattr(self, pause, pause_s - spent_s)
                idle_s, left_s = idle_s + spent_s, left_s - spent_s
                continue
            spent_s = min(left_s, self._left_s)
            self._left_s, left_s = self._left_s - spent_s, left_s - spent_s
            self._checkpoint_s -= spent_s
            self._eval_s -= spent_s
            if self._left_s <= 1e-9:
                self._end_step(self.t_s - left_s)
                idle_s += load.dip_s
        return min(1.0, idle_s)

    def _end_step(self, at_s: float) -> None:
        load = self.load
        self.step += 1
        took_s = self._left_s = self._draw_step()
        self._sawtooth = (self._sawtooth + 0.07) % 1.0
        own_s = load.step_s * 0.8
        for rank in range(GPUS):
            slow = load.slow.get(rank, 1.0)
            forward_s = own_s * slow * math.exp(self.random.gauss(0, 0.05))
            values = {"step": float(self.step), "forward_step_time_s": forward_s, "loss": 2.0 + self.random.random()}
            if rank == 0:
                values |= {"tokens_per_s": 65536 / took_s, "reward": math.nan if load.nan else self.random.random()}
            self.detector.reported(TASK, 1, values, at_s + 0.2 * self.random.random(), rank)
        if self._checkpoint_s <= 0:
            self._checkpoint_s = load.checkpoint_every_s
            self._pause_s = load.checkpoint_s * (0.7 + 0.6 * self.random.random())
        elif self._eval_s <= 0:
            self._eval_s, self._low_s = load.eval_every_s, load.eval_s

    def _host_memory(self) -> HostMemory:
        """Batches that are loaded and freed, a checkpoint that is written from a copy of the weights."""
        batches = 20.0 * self._sawtooth + self._host_random.gauss(0, 2.0)
        copied = 140.0 if self._pause_s > 0 else 0.0
        return HostMemory(self.t_s, min(HOST_GIB, 300.0 + batches + copied + self._host_leaked), HOST_GIB)

    def _window(self, gpu: int, start_s: float, idle_frac: float) -> GpuWindow:
        load, draw = self.load, self.random
        lost = gpu in load.lost
        known = not lost and draw.random() >= load.missing
        use = max(0.0, min(1.0, (load.busy + draw.gauss(0, 0.03)) * (1 - idle_frac)))
        if idle_frac >= 1.0:
            use = max(0.0, draw.gauss(0, 0.005))
        self._leaked[gpu] += load.leak_gib_s.get(gpu, 0.0)
        memory = load.memory_gib + 3.0 * self._sawtooth + draw.gauss(0, 0.05) + self._leaked[gpu]
        celsius = load.celsius + 6 * use + draw.gauss(0, 0.7) + load.hot.get(gpu, 0.0) + gpu % 3
        reason = load.throttle.get(gpu)
        throttle = () if reason is None or draw.random() < 0.2 else (reason,)
        return GpuWindow(
            gpu, "NVIDIA H100", start_s, start_s + 1.0, *([use if known else None] * 3),
            None if lost else min(80.0, memory), None if lost else 80.0, None if lost else celsius,
            None if lost else 120 + 500 * use, 1.0 if known else 0.2,
            Validity.LOST if lost else Validity.KNOWN if known else Validity.UNKNOWN,
            "GPU is lost" if lost else "",
            sm_clock_mhz=None if lost else (1980 if reason is None else 1300) + draw.gauss(0, 15),
            throttle=None if lost else throttle, ecc_uncorrected=None if lost else load.ecc.get(gpu, 0),
            xid=load.xid.pop(gpu, None),
        )  # fmt: skip


def run(gang: Gang, seconds: int, faults: dict[int, Fault]) -> Iterator[tuple[float, float, Change]]:
    """(seconds since the start, seconds since the latest fault, change) for `seconds`, with faults at these seconds."""
    began_s, fault_s = gang.t_s, gang.t_s
    for second in range(seconds):
        if second in faults:
            fault_s = gang.t_s
            faults[second](gang.load)
        for at_s, change in gang.tick():
            yield at_s - began_s, at_s - fault_s, change
