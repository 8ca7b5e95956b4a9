"""What one GPU tells through NVML: which call gives which field, how often it is worth asking, and what N/A is.

Takes the pynvml module that `adapters/nvml.py` imported. Facts are from NVIDIA's nvml.h and its reference manual.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from areal_sky.core.telemetry import GpuSample, Validity

GIB = 1024**3
# Each read asks for memory. The driver measures utilization itself, each 1/6 to 1 s, and keeps many measurements with
# their times: asking once a second misses none and counts none twice. Heat changes in seconds, and since Ampere power
# is a mean over a second; clocks matter less than why they are held down. What was read is repeated meanwhile.
SLOW_S = 1.0
TRAFFIC_S = 2.0  # a rate is a mean since the read before, and these counters are half of what is asked in a second
RARE_S = 5.0
NO_NEWS_S = 2.0  # without a new measurement for so long, ask in the older way
ALL_LINKS = 2**32 - 1
COUNTERS, COUNTS = 7, 3  # of these, the first ones are no traffic
MOST_SAMPLES = 1024  # where the driver does not say how many it keeps
MAIN = ("utilization", "memory", "temperature", "power")  # a sample's `error` speaks of these alone
EARLY_S = 0.01  # reads come a little early or late

THROTTLE = {
    0x2: "application_clocks", 0x4: "sw_power_cap", 0x8: "hw_slowdown", 0x10: "sync_boost", 0x20: "sw_thermal",
    0x40: "hw_thermal", 0x80: "hw_power_brake", 0x100: "display_clocks",
}  # fmt: skip


# pynvml's own structures run Python code at each access to a field, so ours are read by layout.
_SAMPLE = struct.Struct("@QQ")  # nvmlSample_t: when, what
_FIELD = struct.Struct("@IIqqIIQ")  # nvmlFieldValue_t: which, scope, when, latency, type, error, what
_UINT = 0xFFFFFFFF  # of a union whose member is an unsigned int


Counters = tuple[tuple[int, int] | None, ...]  # (us, count) of each


class _Memory(ctypes.Structure):
    """nvmlMemory_v2_t."""

    _fields_ = tuple(
        (name, ctypes.c_uint if name == "version" else ctypes.c_ulonglong)
        for name in ("version", "total", "reserved", "free", "used")
    )


class _Answers:
    """What is told each second is written here."""

    def __init__(self, room: int, fields: bytes):
        self.room = room
        self.samples = ctypes.create_string_buffer(_SAMPLE.size * room)
        self.since, self.count, self.value_type = ctypes.c_ulonglong(0), ctypes.c_uint(0), ctypes.c_int(0)
        self.celsius, self.throttle, self.counters = ctypes.c_uint(0), ctypes.c_ulonglong(0), ctypes.c_int(0)
        self.fields = ctypes.create_string_buffer(fields, len(fields))


@dataclass(slots=True)
class Device:
    """A GPU, or with a `parent` a MIG instance of it, and what is remembered from one read to the next."""

    number: int
    parent: int | None = None
    handle: Any = None
    name: str = "GPU"  # a lost device cannot tell its name any more
    uuid: str = ""
    unsupported: set[str] = field(default_factory=set[str])
    silent: dict[str, str] = field(default_factory=dict[str, str])  # what it did not tell -> why
    ask_memory: Callable[[], int] | None = None  # made at each read of an opened device, by whoever reads
    code: int = 0  # what that call returned
    memory: Any = None  # what it fills
    asks: dict[str, Callable[[], int]] | None = None  # what is asked each second
    answers: Any = None  # and what these fill
    read_s: float = 0.0
    due_s: float = 0.0  # until then memory alone is asked for
    measured_us: int = 0  # the newest of the driver's measurements, by its clock
    utilization: float | None = None
    news_s: float = 0.0  # when one of them was new (monotonic, as all times here)
    slow_s: float = 0.0
    rare_s: float = 0.0
    slow: tuple[Any, ...] = (None,) * 8
    rare: tuple[Any, ...] = (None, None, ())  # SM clock, memory clock, processes
    told: tuple[Any, ...] = ()  # the fields of its last sample from `temperature_celsius` to `processes`
    traffic_s: float = 0.0
    counters: Counters = (None,) * (COUNTERS - COUNTS)  # of traffic, when last read
    traffic: tuple[float | None, ...] = (None,) * 3  # PCIe received and sent, NVLink


class DeviceFields:
    """Reads the fields of any device. `lost`: the exceptions that mean the whole device is gone."""

    def __init__(self, nvml: Any):
        self._nvml = nvml
        self.lost = (
            nvml.NVMLError_GpuIsLost, nvml.NVMLError_ResetRequired, nvml.NVMLError_DriverNotLoaded,
            nvml.NVMLError_Uninitialized, nvml.NVMLError_LibRmVersionMismatch,
        )  # fmt: skip
        # Power in mW, ECC uncorrected and corrected, bytes sent and received by PCIe, KiB by NVLink (of ALL_LINKS).
        # NVML_FI_DEV_*: older pynvml lacks some of the names.
        ecc = nvml.NVML_FI_DEV_ECC_DBE_VOL_TOTAL, nvml.NVML_FI_DEV_ECC_SBE_VOL_TOTAL
        counters = (185, 0), (ecc[0], 0), (ecc[1], 0), (197, 0), (198, 0), (138, ALL_LINKS), (139, ALL_LINKS)
        self._fields = b"".join(_FIELD.pack(which, scope, *[0] * 5) for which, scope in counters)

    def repeat(self, d: Device, t_s: float) -> GpuSample:
        """A read of memory alone, with what else was told last."""
        memory = d.memory
        return GpuSample(d.number, t_s, d.name, d.utilization, memory.used / GIB, memory.total / GIB, *d.told)

    def sample(self, d: Device, now_s: float, t_s: float) -> GpuSample:
        """A read that began, by asking for memory, at `now_s`: `t_s` on the caller's clock. NVMLError: it is lost."""
        used, total = self._memory(d)
        measured: tuple[tuple[float, float], ...] = ()
        if now_s - d.slow_s >= SLOW_S - EARLY_S:
            first = d.slow_s == 0.0
            measured = self._read_slow(d, now_s)
            if now_s - d.rare_s >= RARE_S - EARLY_S:
                self._read_rare(d)
                d.rare_s = now_s
            # Devices take turns from the first read on, so that no round is much longer than the others.
            d.slow_s = now_s - SLOW_S * (d.number % 8) / 8 if first else now_s
        d.due_s = d.slow_s + SLOW_S - EARLY_S
        celsius, watts, throttle, uncorrected, corrected, rx, tx, links = d.slow
        sm_mhz, memory_mhz, processes = d.rare
        d.told = (
            celsius, watts, Validity.UNKNOWN if d.utilization is None else Validity.KNOWN,
            "; ".join(f"{what}: {d.silent[what]}" for what in MAIN if what in d.silent) if d.silent else "",
            d.uuid, sm_mhz, memory_mhz, throttle, uncorrected, corrected, rx, tx, links, None, processes,
        )  # fmt: skip
        return GpuSample(d.number, t_s, d.name, d.utilization, used, total, *d.told, measured)

    def ask(self, d: Device, what: str, call: Callable[..., Any], *rest: Any) -> Any:
        """The answer, or None where there is none. Raises NVMLError only if the whole device is gone."""
        if what in d.unsupported:
            return None
        try:
            answer = call(d.handle, *rest)
        except self.lost:
            raise
        except self._nvml.NVMLError as e:
            self._note(d, what, e)
            return None
        d.silent.pop(what, None)
        return answer

    def forget(self, d: Device) -> None:
        """The device failed: everything is asked anew, since what comes back may be another one."""
        fresh = Device(d.number, d.parent, name=d.name, uuid=d.uuid)
        for slot in Device.__slots__:
            setattr(d, slot, getattr(fresh, slot))

    def _note(self, d: Device, what: str, e: Exception) -> None:
        if isinstance(e, self._nvml.NVMLError_NotSupported | self._nvml.NVMLError_FunctionNotFound):
            d.unsupported.add(what)
        d.silent[what] = str(e)

    def _memory(self, d: Device) -> tuple[float | None, float | None]:
        """GiB used and built in, as `ask_memory` found. That call is made ten times as often as others: no wrapping.

        Version 2 leaves the driver's reserve out of `used`, as nvidia-smi does; old drivers have only version 1.
        """
        nvml = self._nvml
        if d.ask_memory is None and "memory v2" not in d.unsupported:
            d.memory = _Memory(version=nvml.nvmlMemory_v2)
            d.ask_memory = partial(self._function("nvmlDeviceGetMemoryInfo_v2"), d.handle, ctypes.byref(d.memory))
            d.code = d.ask_memory()
        if d.ask_memory is not None:
            if d.code not in (nvml.NVML_ERROR_FUNCTION_NOT_FOUND, nvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH):
                told = self._told(d, "memory", d.code)
                return (d.memory.used / GIB, d.memory.total / GIB) if told else (None, None)
            d.unsupported.add("memory v2")
            d.ask_memory = None
        old = self.ask(d, "memory", nvml.nvmlDeviceGetMemoryInfo)
        return (None, None) if old is None else (old.used / GIB, old.total / GIB)

    def _measure(self, d: Device, now_s: float, told: bool) -> tuple[tuple[float, float], ...]:
        """Sets `utilization`; the driver's measurements since the last call, oldest first, if it `told` of any."""
        if told:
            count = d.answers.count.value * _SAMPLE.size
            pairs = _SAMPLE.iter_unpack(memoryview(d.answers.samples)[:count])
            if news := sorted([(us, percent & _UINT) for us, percent in pairs if us > d.measured_us]):
                if not d.measured_us:
                    news = news[-1:]  # what was before us is nobody's load now
                d.measured_us, d.news_s = news[-1][0], now_s
                d.utilization = news[-1][1] / 100
                return tuple([(us / 1e6, percent / 100) for us, percent in news])
        if not d.news_s or now_s - d.news_s >= NO_NEWS_S:
            rates = self.ask(d, "utilization", self._nvml.nvmlDeviceGetUtilizationRates)
            d.utilization = None if rates is None else rates.gpu / 100
        return ()

    def _read_rare(self, d: Device) -> None:
        nvml = self._nvml
        sm_mhz = memory_mhz = None
        if d.parent is None:
            sm_mhz = self.ask(d, "sm clock", nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM)
            memory_mhz = self.ask(d, "memory clock", nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_MEM)
        told = self.ask(d, "processes", nvml.nvmlDeviceGetComputeRunningProcesses_v3)
        processes = sorted((p.pid, p.usedGpuMemory / GIB) for p in told or () if p.usedGpuMemory is not None)
        d.rare = (_float(sm_mhz), _float(memory_mhz), tuple(processes))

    def _read_slow(self, d: Device, now_s: float) -> tuple[tuple[float, float], ...]:
        """Sets `slow`; returns the driver's measurements. All is asked for before anything is made of it."""
        asks = self._asks(d) if d.asks is None else d.asks
        answers = d.answers
        answers.since.value, answers.count.value = d.measured_us, answers.room
        traffic = now_s - d.traffic_s >= TRAFFIC_S - EARLY_S
        answers.counters.value = COUNTERS if traffic else COUNTS
        codes = [ask() for ask in asks.values()]
        told = [what for what, code in zip(tuple(asks), codes, strict=True) if self._told(d, what, code)]
        measured = self._measure(d, now_s, "samples" in told)
        milliwatts, *counts = self._counters(d, now_s, traffic) if "counters" in told else (None,) * 6
        if milliwatts is None:  # before Ampere
            milliwatts = self.ask(d, "power", self._nvml.nvmlDeviceGetPowerUsage)
        celsius = float(answers.celsius.value) if "temperature" in told else None
        throttle = _reasons(answers.throttle.value) if "throttle" in told else None
        d.slow = (celsius, _scaled(milliwatts, 1000), throttle, *counts)
        return measured

    def _asks(self, d: Device) -> dict[str, Callable[[], int]]:
        """Calls without arguments, made once: little code runs between two of them."""
        nvml, ref = self._nvml, ctypes.byref
        room = MOST_SAMPLES
        with suppress(nvml.NVMLError):  # how many the driver keeps
            room = max(64, 2 * len(nvml.nvmlDeviceGetSamples(d.handle, nvml.NVML_GPU_UTILIZATION_SAMPLES, 0)[1]))
        a = d.answers = _Answers(room, self._fields)
        kind, sensor = ctypes.c_int(nvml.NVML_GPU_UTILIZATION_SAMPLES), ctypes.c_int(nvml.NVML_TEMPERATURE_GPU)
        calls: dict[str, tuple[str, *tuple[Any, ...]]] = {
            "samples": ("nvmlDeviceGetSamples", kind, a.since, ref(a.value_type), ref(a.count), a.samples),
            "temperature": ("nvmlDeviceGetTemperature", sensor, ref(a.celsius)),
        }
        if d.parent is None:
            calls["throttle"] = ("nvmlDeviceGetCurrentClocksThrottleReasons", ref(a.throttle))
            calls["counters"] = ("nvmlDeviceGetFieldValues", a.counters, a.fields)
        d.asks = {
            what: partial(self._function(name), d.handle, *arguments)
            for what, (name, *arguments) in calls.items()
            if what not in d.unsupported
        }
        return d.asks

    def _function(self, name: str) -> Callable[..., int]:
        """The driver's own: pynvml's make their arguments anew each time."""
        return getattr(self._nvml.nvmlLib, name, lambda *_: self._nvml.NVML_ERROR_FUNCTION_NOT_FOUND)

    def _told(self, d: Device, what: str, code: int) -> bool:
        """Whether there is an answer. Raises NVMLError only if the whole device is gone."""
        nvml = self._nvml
        if code == nvml.NVML_SUCCESS:
            d.silent.pop(what, None)
            return True
        e = nvml.NVMLError(code)
        if isinstance(e, self.lost):
            raise e
        if what != "samples":
            self._note(d, what, e)
        elif code != nvml.NVML_ERROR_NOT_FOUND:  # else there is nothing new
            d.unsupported.add(what)
        if d.asks and what in d.unsupported:
            d.asks.pop(what, None)
        return False

    def _counters(self, d: Device, now_s: float, traffic: bool) -> tuple[Any, ...]:
        """(power in mW, ECC uncorrected, corrected, PCIe received, sent, NVLink in MiB/s); `traffic`: anew.

        Rates come from byte counters, since `nvmlDeviceGetPcieThroughput` measures for 20 ms while one waits.
        """
        ok, uint = self._nvml.NVML_SUCCESS, self._nvml.NVML_VALUE_TYPE_UNSIGNED_INT
        told: Counters = tuple([
            (us, count & _UINT if kind == uint else count) if error == ok else None
            for _, _, us, _, kind, error, count in _FIELD.iter_unpack(d.answers.fields)
        ])  # fmt: skip
        if traffic:
            tx, rx, link_tx, link_rx = map(_per_s, d.counters, told[COUNTS:])
            links = None if link_tx is None or link_rx is None else (link_tx + link_rx) / 1024
            d.traffic = (_scaled(rx, 1024**2), _scaled(tx, 1024**2), links)
            d.counters, d.traffic_s = told[COUNTS:], now_s
        return (*[c and c[1] for c in told[:COUNTS]], *d.traffic)


def _per_s(before: tuple[int, int] | None, now: tuple[int, int] | None) -> float | None:
    """How fast a counter rose; None where it is not known, or has started anew."""
    if before is None or now is None:
        return None
    (t0, n0), (t1, n1) = before, now
    return (n1 - n0) / ((t1 - t0) / 1e6) if t1 > t0 and n1 >= n0 else None


def _reasons(bits: int) -> tuple[str, ...]:
    return tuple([name for bit, name in THROTTLE.items() if bits & bit]) if bits else ()


def _float(value: Any) -> float | None:
    return None if value is None else float(value)


def _scaled(value: Any, unit: int) -> float | None:
    return None if value is None else value / unit
