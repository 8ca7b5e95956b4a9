"""What one GPU tells through NVML: which call gives which field, how often it is worth asking, and what N/A is.

Takes the pynvml module that `adapters/nvml.py` imported. Facts are from NVIDIA's nvml.h and its reference manual.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from areal_sky.core.telemetry import GpuSample, Validity

GIB = 1024**3
# Each read asks for memory. The driver measures utilization itself, each 1/6 to 1 s, and keeps many measurements with
# their times: asking once a second misses none and counts none twice. Heat changes in seconds, and since Ampere power
# is a mean over a second; clocks matter less than why they are held down. What was read is repeated meanwhile.
SLOW_S = 1.0
RARE_S = 5.0
NO_NEWS_S = 2.0  # without a new measurement for so long, ask in the older way
ALL_LINKS = 2**32 - 1
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


class _Memory(ctypes.Structure):
    """nvmlMemory_v2_t."""

    _fields_ = tuple(
        (name, ctypes.c_uint if name == "version" else ctypes.c_ulonglong)
        for name in ("version", "total", "reserved", "free", "used")
    )


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
    memory: Any = None  # (call, its argument, the struct it fills)
    code: int = 0  # what that call returned
    read_s: float = 0.0
    due_s: float = 0.0  # until then memory alone is asked for
    samples: Any = None  # room for the driver's measurements
    fields: Any = None  # and for its counters
    measured_us: int = 0  # the newest of these, by the driver's clock
    utilization: float | None = None
    news_s: float = 0.0  # when one of them was new (monotonic, as all times here)
    slow_s: float = 0.0
    rare_s: float = 0.0
    slow: tuple[Any, ...] = (None,) * 8
    rare: tuple[Any, ...] = (None, None, ())  # SM clock, memory clock, processes
    told: tuple[Any, ...] = ()  # the fields of its last sample from `temperature_celsius` to `processes`
    counters: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])  # id -> (us, count)


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
        self._counter_ids = (185, *ecc, 197, 198, 138, 139)

    def ask_memory(self, d: Device, now_s: float) -> bool:
        """Ask an opened device for what is due at each read; True if that is all that is due now (`repeat` it then).

        Apart from what is made of it, so that little code runs between two calls that wait: after each the caches are
        cold, and that is most of what the agent costs.
        """
        d.read_s = now_s
        if d.memory is None:
            return False
        d.code = d.memory[0](d.handle, d.memory[1])
        return d.code == 0 and now_s < d.due_s and not d.silent

    def repeat(self, d: Device, t_s: float) -> GpuSample:
        """A read of memory alone, with what else was told last."""
        memory = d.memory[2]
        return GpuSample(d.number, t_s, d.name, d.utilization, memory.used / GIB, memory.total / GIB, *d.told)

    def sample(self, d: Device, now_s: float, t_s: float) -> GpuSample:
        """The read that `ask_memory` began at `now_s`, which is `t_s` on the caller's clock. NVMLError: it is lost."""
        used, total = self._memory(d)
        measured: tuple[tuple[float, float], ...] = ()
        if now_s - d.slow_s >= SLOW_S - EARLY_S:
            measured = self._measure(d, now_s)
            first = d.slow_s == 0.0
            if now_s - d.rare_s >= RARE_S - EARLY_S:
                self._read_rare(d)
                d.rare_s = now_s
            self._read_slow(d)
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
        if d.memory is None and "memory v2" not in d.unsupported:
            struct = _Memory(version=nvml.nvmlMemory_v2)
            call = getattr(nvml.nvmlLib, "nvmlDeviceGetMemoryInfo_v2", None)
            if call is None:
                d.unsupported.add("memory v2")
            else:
                d.memory = (call, ctypes.byref(struct), struct)
                d.code = call(d.handle, d.memory[1])
        if d.memory is not None:
            code, struct = d.code, d.memory[2]
            if code == 0:
                if d.silent:
                    d.silent.pop("memory", None)
                return struct.used / GIB, struct.total / GIB
            if code not in (nvml.NVML_ERROR_FUNCTION_NOT_FOUND, nvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH):
                e = nvml.NVMLError(code)
                if isinstance(e, self.lost):
                    raise e
                d.silent["memory"] = str(e)
                return None, None
            d.unsupported.add("memory v2")
            d.memory = None
        old = self.ask(d, "memory", nvml.nvmlDeviceGetMemoryInfo)
        return (None, None) if old is None else (old.used / GIB, old.total / GIB)

    def _measure(self, d: Device, now_s: float) -> tuple[tuple[float, float], ...]:
        """Sets `utilization`; the driver's measurements since the last call, oldest first."""
        news = self._new_measurements(d)
        if news:
            if not d.measured_us:
                news = news[-1:]  # what was before us is nobody's load now
            d.measured_us, d.news_s = news[-1][0], now_s
            d.utilization = news[-1][1] / 100
            return tuple((us / 1e6, percent / 100) for us, percent in news)
        if not d.news_s or now_s - d.news_s >= NO_NEWS_S:
            rates = self.ask(d, "utilization", self._nvml.nvmlDeviceGetUtilizationRates)
            d.utilization = None if rates is None else rates.gpu / 100
        return ()

    def _new_measurements(self, d: Device) -> list[tuple[int, int]]:
        """(us, percent). pynvml's own call asks for the size of the buffer each time, which never changes."""
        nvml = self._nvml
        if "samples" in d.unsupported:
            return []
        kind, count = ctypes.c_int(nvml.NVML_GPU_UTILIZATION_SAMPLES), ctypes.c_uint(0)
        value_type, since = ctypes.c_int(0), ctypes.c_ulonglong(d.measured_us)
        try:
            if d.samples is None:
                _, kept = nvml.nvmlDeviceGetSamples(d.handle, kind.value, 0)
                d.samples = ctypes.create_string_buffer(_SAMPLE.size * max(64, 2 * len(kept)))
            count.value = len(d.samples) // _SAMPLE.size
            code = nvml.nvmlLib.nvmlDeviceGetSamples(
                d.handle, kind, since, ctypes.byref(value_type), ctypes.byref(count), d.samples
            )
            if code != nvml.NVML_SUCCESS:
                raise nvml.NVMLError(code)
        except self.lost:
            raise
        except nvml.NVMLError_NotFound:
            return []
        except nvml.NVMLError:
            d.unsupported.add("samples")
            return []
        told = _SAMPLE.iter_unpack(d.samples.raw[: count.value * _SAMPLE.size])
        return sorted((us, percent & _UINT) for us, percent in told if us > d.measured_us)

    def _read_rare(self, d: Device) -> None:
        nvml = self._nvml
        sm_mhz = memory_mhz = None
        if d.parent is None:
            sm_mhz = self.ask(d, "sm clock", nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM)
            memory_mhz = self.ask(d, "memory clock", nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_MEM)
        told = self.ask(d, "processes", nvml.nvmlDeviceGetComputeRunningProcesses_v3)
        processes = sorted((p.pid, p.usedGpuMemory / GIB) for p in told or () if p.usedGpuMemory is not None)
        d.rare = (_float(sm_mhz), _float(memory_mhz), tuple(processes))

    def _read_slow(self, d: Device) -> None:
        nvml = self._nvml
        celsius = self.ask(d, "temperature", nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU)
        if d.parent is not None:
            milliwatts = self.ask(d, "power", nvml.nvmlDeviceGetPowerUsage)
            d.slow = (_float(celsius), _scaled(milliwatts, 1000), None, None, None, None, None, None)
            return
        reasons = self.ask(d, "throttle", nvml.nvmlDeviceGetCurrentClocksThrottleReasons)
        milliwatts, *counts = self._counters(d)
        if milliwatts is None:  # before Ampere
            milliwatts = self.ask(d, "power", nvml.nvmlDeviceGetPowerUsage)
        throttle = None if reasons is None else tuple(name for bit, name in THROTTLE.items() if reasons & bit)
        d.slow = (_float(celsius), _scaled(milliwatts, 1000), throttle, *counts)

    def _counters(self, d: Device) -> tuple[Any, ...]:
        """(power in mW, ECC uncorrected, corrected, PCIe received, sent, NVLink in MiB/s), all in one call.

        Rates come from byte counters, since `nvmlDeviceGetPcieThroughput` measures for 20 ms while one waits.
        """
        watts, uncorrected, corrected, tx, rx, link_tx, link_rx = self._counter_ids
        told = self.ask(d, "counters", self._ask_counters, d) or ()
        ok, uint = self._nvml.NVML_SUCCESS, self._nvml.NVML_VALUE_TYPE_UNSIGNED_INT
        now = {
            which: (us, count & _UINT if kind == uint else count)
            for which, _, us, _, kind, error, count in told
            if error == ok
        }
        before, d.counters = d.counters, now

        def per_s(counter: int, unit: int) -> float | None:
            if counter not in before or counter not in now:
                return None
            (t0, n0), (t1, n1) = before[counter], now[counter]
            return (n1 - n0) / unit / ((t1 - t0) / 1e6) if t1 > t0 and n1 >= n0 else None

        links = (per_s(link_tx, 1024), per_s(link_rx, 1024))
        both = None if links[0] is None or links[1] is None else links[0] + links[1]
        counts = (now.get(f, (0, None))[1] for f in (watts, uncorrected, corrected))
        return (*counts, per_s(rx, 1024**2), per_s(tx, 1024**2), both)

    def _ask_counters(self, handle: Any, d: Device) -> Iterator[tuple[int, ...]]:
        """Raises NVMLError."""
        nvml, ids = self._nvml, self._counter_ids
        if d.fields is None:
            scopes = [0] * (len(ids) - 2) + [ALL_LINKS] * 2
            asked = [_FIELD.pack(which, scope, *[0] * 5) for which, scope in zip(ids, scopes, strict=True)]
            d.fields = ctypes.create_string_buffer(b"".join(asked), _FIELD.size * len(ids))
        call = getattr(nvml.nvmlLib, "nvmlDeviceGetFieldValues", None)
        code = nvml.NVML_ERROR_FUNCTION_NOT_FOUND if call is None else call(handle, len(ids), d.fields)
        if code != nvml.NVML_SUCCESS:
            raise nvml.NVMLError(code)
        return _FIELD.iter_unpack(d.fields.raw)


def _float(value: Any) -> float | None:
    return None if value is None else float(value)


def _scaled(value: Any, unit: int) -> float | None:
    return None if value is None else value / unit
