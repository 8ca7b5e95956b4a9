"""Faults scripted into a gang's telemetry are found for what and where they are; what is healthy is left alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from areal_sky.core.anomaly import SILENT_S, Detector, Run
from areal_sky.core.findings import Finding, Kind
from areal_sky.core.heartbeat import HostMemory, RankOn
from areal_sky.core.telemetry import GpuWindow, Validity
from areal_sky.core.windowcodec import batch_of
from areal_sky.spec.alerts import ANOMALIES
from benchmarks.detection import FAULTS, trial
from benchmarks.scripted_load import Gang, Load, run

T = 1000.0
RANKS = tuple(RankOn("t1", g, (g,)) for g in range(4))


def window(end_s: float, device: int = 0, use: float | None = 0.9, **more) -> GpuWindow:
    known = Validity.UNKNOWN if use is None else Validity.KNOWN
    fields = {"memory_used_gib": 40.0, "temperature_celsius": 70.0, "validity": known} | more
    return GpuWindow(
        device, "H100", end_s - 1, end_s, use, use, use, fields.pop("memory_used_gib"), 80.0,
        fields.pop("temperature_celsius"), 400.0, 1.0, **fields,
    )  # fmt: skip


class Node:
    """Four GPUs of one gang; `work` tells of some seconds of it."""

    def __init__(self) -> None:
        self.detector = Detector()
        self.t_s = T
        self.run()

    def run(self, attempt: int = 1, low: bool = False) -> None:
        self.detector.run([Run("t1", attempt, low)], self.t_s)

    def work(self, seconds: int, of: Callable[[float, int], GpuWindow] = window, step_s: int | None = None) -> None:
        for _ in range(seconds):
            self.t_s += 1.0
            self.detector.heard("c-w-0", 0, RANKS, batch_of([of(self.t_s, g) for g in range(4)]))
            if step_s and int(self.t_s) % step_s == 0:
                self.detector.reported("t1", 1, {"step": self.t_s // step_s}, self.t_s)

    def found(self) -> list[Finding]:
        return self.detector.findings(self.t_s + 0.1)

    def kinds(self) -> set[str]:
        return {f.kind.value for f in self.found()}


def idle(end_s: float, device: int) -> GpuWindow:
    return window(end_s, device, 0.0)


def unknown(end_s: float, device: int) -> GpuWindow:
    return window(end_s, device, None)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_and_nothing_else(name: str) -> None:
    found = trial(name, seed=1)
    assert found.found_s is not None and found.wrong == []


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    assert [str(c.alert) for _, _, c in run(Gang(77, Load(step_s=3.0)), 1500, {})] == []


def test_every_kind_that_is_found_unasked_can_be_named_in_a_rule() -> None:
    assert set(ANOMALIES) == {k.value for k in Kind} - {Kind.RULE, Kind.MANUAL}


def test_what_is_not_known_is_no_stall() -> None:
    node = Node()
    node.work(60)
    node.work(60, unknown)
    assert node.kinds() == set()
    node.t_s += 60  # and silence is none
    assert node.kinds() == set()
    node.work(8, idle)
    assert node.kinds() == {"stall"}


def test_a_stall_tells_since_when_and_why() -> None:
    node = Node()
    node.work(60, step_s=2)
    began_s = node.t_s
    node.work(9, idle)
    (stall,) = node.found()
    assert (str(stall.where), stall.since_s) == ("t1", began_s)
    assert stall.evidence == "its GPUs idle for 9s, no step for 9.1s"


def test_a_pause_that_it_has_made_before_is_no_stall_and_a_longer_one_is() -> None:
    node = Node()
    node.work(60)
    node.work(5, idle)
    node.work(30)
    node.work(9, idle)
    assert node.kinds() == set()
    node.work(3, idle)
    assert node.kinds() == {"stall"}


def test_a_low_phase_is_no_stall_nor_is_its_end() -> None:
    node = Node()
    node.work(60, step_s=2)
    node.run(low=True)
    node.work(100, idle)
    assert node.kinds() == set()
    node.run(low=False)
    node.work(3, idle)
    assert node.kinds() == set()
    node.work(10, idle)
    assert node.kinds() == {"stall"}


def test_a_new_attempt_is_learnt_anew() -> None:
    node = Node()
    node.work(60)
    node.work(10, idle)
    assert node.kinds() == {"stall"}
    node.run(attempt=2)
    node.work(20, idle)  # it loads its checkpoint
    assert node.kinds() == set()
    node.detector.reported("t1", 1, {"loss": float("nan")}, node.t_s)  # late words of the old one
    assert node.kinds() == set()


def test_cpu_only_tasks_stall_by_their_reports() -> None:
    detector = Detector()
    detector.run([Run("t1", 1)], T)
    for step in range(10):
        detector.reported("t1", 1, {"step": step}, T + 3 * step)
    assert detector.findings(T + 27 + 7) == []
    (stall,) = detector.findings(T + 27 + 9)
    assert (stall.kind, stall.since_s) == (Kind.STALL, T + 27)
    detector.reported("t1", 1, {"step": 10}, T + 40)
    assert detector.findings(T + 41) == []


def test_a_lost_gpu_and_driver_errors() -> None:
    node = Node()
    node.work(10)

    def after(second: int, use: float | None = 0.9, **more) -> set[tuple[str, str]]:
        node.detector.heard("c-w-0", 0, RANKS, batch_of([window(node.t_s + second, 2, use, **more)]))
        return {(f.kind.value, str(f.where)) for f in node.found()}

    gpu = "c-w-0/0 GPU 2"
    assert after(1, None, validity=Validity.LOST, error="GPU is lost") == {("lost_gpu", gpu)}
    assert after(2, ecc_uncorrected=3) == set()  # since before we looked
    assert after(3, ecc_uncorrected=4, xid=48) == {("ecc", gpu), ("xid", gpu)}
    assert after(3, None, validity=Validity.LOST) == {("ecc", gpu), ("xid", gpu)}  # another of that time: sent twice


def test_a_gpu_that_is_hot_as_all_are_is_not_found() -> None:
    node = Node()
    node.work(60, lambda t, g: window(t, g, temperature_celsius=86.0))
    assert node.kinds() == set()
    for _ in range(12):
        node.work(1, lambda t, g: window(t, g, temperature_celsius=86.0 if g else 97.0))
        found = node.found()
    (heat,) = found
    assert heat.evidence == "at 97 °C, its neighbours with the same load at 86 °C"


def test_memory_that_fills_up_flattens_or_falls_back_is_no_leak() -> None:
    def growing(of: Callable[[float], float]) -> Node:
        node = Node()
        node.work(900, lambda t, g: window(t, g, memory_used_gib=of(t - T)))
        return node

    assert growing(lambda s: 70 - 50 * 0.98**s).kinds() == set()  # a cache
    assert growing(lambda s: 40 + 20 * (s % 120) / 120).kinds() == set()  # garbage that is collected
    assert growing(lambda s: 40 + 0.002 * s).kinds() == set()  # out of memory in five hours
    (leak,) = growing(lambda s: 40 + 0.03 * s).found()
    assert leak.kind is Kind.MEMORY_LEAK and str(leak.where) == "t1"
    assert leak.metrics["seconds_to_oom"] == pytest.approx((80 - 40 - 0.03 * 900) / 0.03, rel=0.05)


def test_a_machine_whose_memory_grows_is_found_whoever_leaves_it() -> None:
    def filling(of: Callable[[int], float], tasks: Callable[[int], int] = lambda s: 2) -> list[Finding]:
        detector, quiet = Detector(), batch_of([])
        for second in range(0, 1200, 10):
            names = [f"t{n}" for n in range(1, 1 + tasks(second))]
            detector.run([Run(t, 1) for t in names], T + second)
            memory = HostMemory(T + second, of(second), 512.0)
            detector.heard("c-w-0", 0, [RankOn(t, 0, ()) for t in names], quiet, memory)
        assert detector.findings(T + 1200 + SILENT_S) == []  # a machine that fell silent
        return detector.findings(T + 1200)

    assert filling(lambda s: 100 + 0.3 * (s % 150)) == []  # garbage that is collected
    assert filling(lambda s: 400 - 300 * 0.99**s) == []  # a cache
    assert filling(lambda s: 50 + 40 * (s // 100), tasks=lambda s: 1 + s // 100) == []  # tasks that start one by one
    for tasks in (lambda s: 2, lambda s: 4 - s // 300):  # tasks that end change nothing
        (leak,) = filling(lambda s: 100 + 0.2 * s, tasks)
        assert (leak.kind, str(leak.where)) == (Kind.MEMORY_LEAK, "c-w-0/0")
        assert leak.where.affected == tuple(f"t{n}" for n in range(1, 1 + tasks(1190)))
        assert leak.what.startswith("the machine's memory grows and will run out in about 14m30s")
        assert leak.metrics["gib_per_minute"] == pytest.approx(12)


def test_a_rate_that_stays_low_is_the_new_usual() -> None:
    detector = Detector()
    detector.run([Run("t1", 1)], T)
    raised = set[int]()
    for second in range(2000):
        rate = 100.0 if second < 400 else 50.0
        detector.reported("t1", 1, {"tokens_per_s": rate + second % 3}, T + second)
        if any(f.kind is Kind.THROUGHPUT_DROP for f in detector.findings(T + second)):
            raised.add(second)
    assert min(raised) < 430 and 900 < max(raised) < 1100


def test_a_gang_of_unlike_ranks_has_no_straggler() -> None:
    node = Node()
    node.work(200, lambda t, g: window(t, g, 0.2 if g == 3 else 0.95))  # rank 3 was made to do less
    assert node.kinds() == set()


def test_a_node_that_leaves_takes_its_findings_along() -> None:
    node = Node()
    node.work(5, lambda t, g: window(t, g, None, validity=Validity.LOST))
    assert len(node.found()) == 4
    node.detector.left("c-w-0", 0)
    assert node.found() == [] and list(node.detector.devices()) == []
