"""What a GPU's windows tell of its health: lost, driver errors, memory errors, heat, memory that will run out."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from areal_sky.core.findings import Finding, Kind, Where
from areal_sky.core.memoryleak import LeakWatch
from areal_sky.core.telemetry import GpuWindow, Validity
from areal_sky.core.windowcodec import Batch

# NVIDIA's XID catalogue (docs.nvidia.com/deploy/xid-errors): these are the application's doing, not the device's.
APPLICATION_XIDS = frozenset({13, 31, 43, 45, 68})
# And after these the device does not work until it is reset.
BROKEN_XIDS = frozenset({48, 61, 62, 64, 74, 79, 95, 119, 120})
XIDS = {
    13: "graphics engine exception", 31: "memory page fault of a program", 43: "a program's channel was stopped",
    45: "a program was ended", 48: "double-bit memory error", 61: "internal microcontroller fault",
    62: "internal microcontroller halt", 63: "memory row remapped", 64: "memory row could not be remapped",
    68: "video processor exception", 74: "NVLink error", 79: "fell off the bus", 92: "many single-bit memory errors",
    94: "contained memory error", 95: "uncontained memory error", 119: "GSP does not answer", 120: "GSP error",
}  # fmt: skip
XID_SHOWN_S = 120.0  # an error is an event: the finding lasts this long after the latest

THERMAL = ("thermal",)  # in the names of throttle reasons that are heat; power caps and idle clocks are not
THROTTLED_S = 5.0  # of the latest HEAT_S
HEAT_S = 10.0
HOT_CELSIUS = 80.0  # below this no device is called hot, however cool the others are
HOTTER_CELSIUS = 10.0  # than the neighbours that work as much
SAME_LOAD = 0.3


def is_calm(windows: Batch) -> bool:
    """Whether none of a node's windows tells of trouble by itself: so it is nearly always, and is found out at once."""
    return (
        Validity.LOST not in windows["validity"]
        and windows["xid"].count(None) == len(windows)
        and not any(reasons and _thermal(reasons) for reasons in windows["throttle"])
    )


class DeviceWatch:
    """One GPU. Windows come in order; all times are those of their ends, on the head's clock."""

    __slots__ = (
        "_at", "_celsius", "_ecc", "_ecc_s", "_heat", "_latest", "_lost_s", "_memory", "_owner", "_throttled", "_xid",
        "_xid_s",
    )  # fmt: skip

    def __init__(self) -> None:
        self._at: tuple[Batch, int] | None = None  # where its latest window is
        self._latest: GpuWindow | None = None  # that, once somebody has asked for it
        self._celsius: float | None = None
        self._lost_s: float | None = None
        self._xid: int | None = None
        self._xid_s = 0.0
        self._ecc: int | None = None  # the count that is known, and when it rose last
        self._ecc_s: float | None = None
        self._throttled: deque[tuple[float, str]] = deque()
        self._heat: float | None = None  # since when it is hotter than its neighbours
        self._owner: object = None
        self._memory = LeakWatch()

    @property
    def latest(self) -> GpuWindow | None:
        """The latest window."""
        if self._latest is None and self._at is not None:
            self._latest = self._at[0].window(self._at[1])
        return self._latest

    def see(self, windows: Batch, places: slice, owner: object, calm: bool) -> None:
        """Takes windows that came together, its own being at `places`. `calm`: what `is_calm` says of them.

        `owner` is the one run on the device, None where there is none or several.
        """
        last = places.stop - 1
        self._at, self._latest, self._celsius = (windows, last), None, windows["temperature_celsius"][last]
        ends, ecc = windows["end_s"], windows["ecc_uncorrected"][places]
        if not calm or self._lost_s is not None or self._throttled or ecc.count(self._ecc) < len(ecc):
            for i in range(places.start, places.stop):
                self._see_trouble(windows.window(i))
        memory = self._memory
        if owner != self._owner:
            self._owner = owner
            memory.begin(ends[places.start])
        if owner is not None and ends[last] >= memory.next_s:
            for end_s, used in zip(ends[places], windows["memory_used_gib"][places], strict=True):
                if used is not None:
                    memory.see(end_s, used)

    def _see_trouble(self, w: GpuWindow) -> None:
        if w.validity is Validity.LOST:
            self._lost_s = w.start_s if self._lost_s is None else self._lost_s
        else:
            self._lost_s = None
        if w.xid is not None:
            self._xid, self._xid_s = w.xid, w.end_s
        if w.ecc_uncorrected is not None:
            if self._ecc is not None and w.ecc_uncorrected > self._ecc:
                self._ecc_s = w.end_s
            self._ecc = w.ecc_uncorrected
        if w.throttle and (hot := _thermal(w.throttle)):
            self._throttled.append((w.end_s, hot))
        while self._throttled and self._throttled[0][0] <= w.end_s - HEAT_S:
            self._throttled.popleft()

    def suspicious(self) -> bool:
        """Whether it is worth to ask for findings: False for the healthy, which are nearly all, at little cost."""
        return (
            self._lost_s is not None or self._xid is not None or self._ecc_s is not None or bool(self._throttled)
            or self._memory.leak is not None or self._memory.due()
            or (self._celsius is not None and self._celsius >= HOT_CELSIUS) or self._heat is not None
        )  # fmt: skip

    def findings(self, where: Where, peers: Sequence[GpuWindow], now_s: float) -> Iterator[Finding]:
        """What is wrong with it now. `peers`: the latest windows of the other GPUs of its node."""
        w = self.latest
        if w is None:
            return
        if self._lost_s is not None:
            yield Finding(Kind.LOST_GPU, where, self._lost_s, f"the GPU is lost ({w.name})", w.error or "NVML: lost")
        if self._xid is not None and now_s - self._xid_s > XID_SHOWN_S:
            self._xid = None
        if self._xid is not None:
            words = XIDS.get(self._xid, "see NVIDIA's XID catalogue")
            whose = "a program's doing" if self._xid in APPLICATION_XIDS else "the device's or the driver's"
            yield Finding(
                Kind.XID, where, self._xid_s, f"the driver reports XID {self._xid}: {words}", whose,
                metrics={"gpu_xid": self._xid},
            )  # fmt: skip
        if self._ecc_s is not None:
            yield Finding(
                Kind.ECC, where, self._ecc_s, "uncorrectable memory errors", f"the count has risen to {self._ecc}",
                metrics={"gpu_ecc_uncorrected": float(self._ecc or 0)},
            )  # fmt: skip
        yield from self._hot(w, where, peers)
        leak = self._memory.look(w.end_s, w.memory_total_gib or 0.0)
        if leak is not None:
            yield leak.finding(where, "GPU memory")

    def _hot(self, w: GpuWindow, where: Where, peers: Sequence[GpuWindow]) -> Iterator[Finding]:
        celsius = "of unknown temperature" if w.temperature_celsius is None else f"at {w.temperature_celsius:.0f} °C"
        metrics = {} if w.temperature_celsius is None else {"gpu_temperature_celsius": w.temperature_celsius}
        if len(self._throttled) >= THROTTLED_S:
            since_s, reason = self._throttled[0]
            evidence = f"{reason} in {len(self._throttled)} of the last {HEAT_S:.0f} s, {celsius}"
            yield Finding(
                Kind.HEAT, where, since_s, "the GPU is slowed down for its heat", evidence, metrics=metrics
            )
            return
        warm = w.temperature_celsius
        usual = _usual_celsius(w, peers) if warm is not None and warm >= HOT_CELSIUS else None
        if warm is None or usual is None or warm < usual + HOTTER_CELSIUS:
            self._heat = None
            return
        self._heat = w.end_s if self._heat is None else self._heat
        if w.end_s - self._heat >= HEAT_S:
            evidence = f"{celsius}, its neighbours with the same load at {usual:.0f} °C"
            yield Finding(
                Kind.HEAT, where, self._heat, "the GPU is much hotter than its neighbours", evidence, metrics=metrics
            )


def _thermal(reasons: Iterable[str]) -> str | None:
    return next((r for r in reasons if any(t in r for t in THERMAL)), None)


def _usual_celsius(w: GpuWindow, peers: Iterable[GpuWindow]) -> float | None:
    """The middle temperature of three or more neighbours that work as much; None where there are no such."""
    if w.utilization_mean is None:
        return None
    alike = [
        p.temperature_celsius
        for p in peers
        if p.temperature_celsius is not None and p.utilization_mean is not None
        and abs(p.utilization_mean - w.utilization_mean) <= SAME_LOAD
    ]  # fmt: skip
    return statistics.median(alike) if len(alike) >= 3 else None
