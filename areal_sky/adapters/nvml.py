"""The door to NVIDIA's management library: the only `import pynvml` (package nvidia-ml-py).

A GPU that fails, or whose driver does not answer in time, is that GPU's own state and never hides its neighbours; a
field that a device does not support is None, never 0; a machine without a driver is an ordinary answer, not an error.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

from areal_sky.adapters.lanes import Lanes
from areal_sky.adapters.nvmldevice import EARLY_S, Device, DeviceFields
from areal_sky.adapters.ports import GpuReader
from areal_sky.core.telemetry import GpuSample, Validity

# NVML answers in 0.01 to 1 ms; a call that takes this long, and until the next look (`LOOK_S`) at that, is a driver in
# trouble, or a node short of CPU.
PATIENCE_S = 0.2
REPEAT_S = 1.0  # the last sample of a device that does not answer stands in for that long
XIDS_S = 1.0
MIG_S = 30.0  # instances are made and removed by an operator, at any time
MIG_FROM = 64  # instance i of GPU n has the number 64 + 8 n + i: NVML numbers instances per GPU only, 7 at most
EVENTS = -1  # takes its turn among the devices: asking for events and instances is a call into the driver too


def open_reader() -> tuple[GpuReader | None, str]:
    """A reader of this machine's NVIDIA GPUs and "", or None and why there is none."""
    try:
        import pynvml
    except ImportError as e:
        return None, f"nvidia-ml-py cannot be imported: {e}"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as e:
        return None, f"NVML does not start: {e}"
    try:
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError as e:
        _shutdown(pynvml)
        return None, f"NVML cannot count the GPUs: {e}"
    if count == 0:
        _shutdown(pynvml)
        return None, "NVML sees no GPU on this machine"
    return NvmlGpuReader(pynvml, count), ""


class NvmlGpuReader:
    """Reads devices 0..count-1 of an initialised NVML, and their MIG instances. Made by `open_reader`; close it once.

    `read` calls the driver, which may hang: `relieve` then lets another thread go on with the devices that answer, and
    the `read` that hung raises Relieved. `lanes.in_relays` does so.
    """

    def __init__(self, nvml: Any, count: int):
        self._nvml = nvml
        self._fields = DeviceFields(nvml)
        self._devices = {number: Device(number) for number in range(count)}
        self._samples: dict[int, Any] = {}
        self._offset_s = 0.0  # the caller's clock less ours
        self._lanes = Lanes(self._look, PATIENCE_S)
        self.relieve = self._lanes.relieve
        self._instances = self._listed = frozenset[int]()
        self._mig_s: float | None = None
        self._events: Any = None
        self._events_due_s = 0.0
        self._xids: dict[int, int] = {}

    def read(self, now_s: float) -> Sequence[GpuSample]:
        """One sample per device, in device order, whatever state each is in; `t_s` is when it was read."""
        self._offset_s = now_s - time.monotonic()
        instances = self._instances
        if instances is not self._listed:
            gpus = {n: d for n, d in self._devices.items() if n < MIG_FROM}
            mig = {n: self._devices.get(n) or Device(n, (n - MIG_FROM) // 8) for n in sorted(instances)}
            self._devices, self._listed = gpus | mig, instances
        keys = tuple(self._devices)
        news: dict[int, Any] = self._lanes.round(keys if self._events_due_s > time.monotonic() else (*keys, EVENTS))
        for number, quick in news.items():
            if quick is True and number in self._devices:
                device = self._devices[number]
                news[number] = self._fields.repeat(device, device.read_s + self._offset_s)
        if news.pop(EVENTS, None) is None and len(news) == len(self._devices) and not self._xids:
            self._samples = news  # as nearly always
            return tuple(news[n] for n in self._devices)
        self._samples = {**self._samples, **{n: s for n, s in news.items() if s is not True}}
        return tuple(self._latest(device, now_s) for device in self._devices.values())

    def close(self) -> None:
        if self._lanes.idle():
            _shutdown(self._nvml)

    def _latest(self, device: Device, now_s: float) -> GpuSample:
        """The sample of this read, or for a while the last one of a device that does not answer."""
        number = device.number
        sample = self._samples.get(number)
        if sample is not None and sample.t_s >= now_s - REPEAT_S:
            return sample._replace(xid=self._xids.pop(number)) if number in self._xids else sample
        t_s = now_s if sample is None else sample.t_s
        silent_s = max(self._lanes.held_s(number), now_s - t_s)
        return _blank(device, t_s, Validity.STALE, f"NVML has not answered for {silent_s:.1f} s")

    # ------------------------------------------------------------ calls into the driver

    def _look(self, key: int, now_s: float) -> GpuSample | bool | None:
        """The sample of a device; True: memory alone was due, and `read` makes the sample."""
        device = self._devices.get(key)
        if device is None:
            self._events_due_s = now_s + XIDS_S - EARLY_S
            self._note_xids()
            self._find_instances(now_s)
            return None
        device.read_s = now_s
        if device.ask_memory is not None:
            device.code = code = device.ask_memory()
            if code == 0 and now_s < device.due_s and not device.silent:
                return True
        t_s = now_s + self._offset_s
        try:
            if device.handle is None:
                self._open(device)
            return self._fields.sample(device, now_s, t_s)
        except self._nvml.NVMLError as e:
            self._fields.forget(device)
            lost = isinstance(e, self._fields.lost)
            return _blank(device, t_s, Validity.LOST if lost else Validity.UNKNOWN, str(e))

    def _open(self, device: Device) -> None:
        nvml = self._nvml
        if device.parent is None:
            device.handle = nvml.nvmlDeviceGetHandleByIndex(device.number)
        else:
            parent = nvml.nvmlDeviceGetHandleByIndex(device.parent)
            device.handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(parent, (device.number - MIG_FROM) % 8)
        device.name = _text(self._fields.ask(device, "name", nvml.nvmlDeviceGetName)) or device.name
        device.uuid = _text(self._fields.ask(device, "uuid", nvml.nvmlDeviceGetUUID)) or device.uuid
        if device.parent is None:
            with contextlib.suppress(nvml.NVMLError):  # there are no event sets everywhere: then no XID is known
                if self._events is None:
                    self._events = nvml.nvmlEventSetCreate()
                nvml.nvmlDeviceRegisterEvents(device.handle, nvml.nvmlEventTypeXidCriticalError, self._events)

    def _note_xids(self) -> None:
        """Errors that the driver has logged since the last look. Waits for none."""
        nvml = self._nvml
        if self._events is None:
            return
        with contextlib.suppress(nvml.NVMLError):  # a timeout is the usual answer
            for _ in range(64):
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
                self._xids[nvml.nvmlDeviceGetIndex(event.device)] = int(event.eventData)

    def _find_instances(self, now_s: float) -> None:
        """Which MIG instances the GPUs are cut into."""
        nvml = self._nvml
        if self._mig_s is not None and now_s - self._mig_s < MIG_S:
            return
        self._mig_s = now_s
        found: set[int] = set()
        for device in list(self._devices.values()):
            if device.parent is not None or device.handle is None:
                continue
            with contextlib.suppress(nvml.NVMLError):
                mode = self._fields.ask(device, "mig", nvml.nvmlDeviceGetMigMode)
                for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(device.handle) if mode and mode[0] else 0):
                    with contextlib.suppress(nvml.NVMLError_NotFound):
                        nvml.nvmlDeviceGetMigDeviceHandleByIndex(device.handle, index)
                        found.add(MIG_FROM + 8 * device.number + index)
        if found != self._instances:
            self._instances = frozenset(found)


def _blank(device: Device, t_s: float, validity: Validity, error: str) -> GpuSample:
    return GpuSample(device.number, t_s, device.name, None, None, None, None, None, validity, error, device.uuid)


def _text(value: str | bytes | None) -> str:
    return value.decode() if isinstance(value, bytes) else value or ""  # bytes before 11.5


def _shutdown(nvml: Any) -> None:
    with contextlib.suppress(nvml.NVMLError):  # a driver that is gone already leaves nothing to close
        nvml.nvmlShutdown()
