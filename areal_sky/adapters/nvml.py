"""The door to NVIDIA's management library: the only `import pynvml` (package nvidia-ml-py).

A GPU that fails is that GPU's own state and never hides its neighbours; a field that a device does not support is
None, never 0; a machine without a driver is an ordinary answer, not an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from areal_sky.adapters.ports import GpuReader
from areal_sky.core.telemetry import GpuSample, Validity

GIB = 1024**3

T = TypeVar("T")


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
    """Reads devices 0..count-1 of an initialised NVML. Made by `open_reader`; close it once, at the end."""

    def __init__(self, nvml: Any, count: int):
        self._nvml = nvml
        self._count = count
        self._handles: dict[int, Any] = {}
        self._names: dict[int, str] = {}  # a lost device cannot tell its name any more

    def read(self, now_s: float) -> Sequence[GpuSample]:
        """One sample per device, in device order, whatever state each is in."""
        return tuple(self._read_device(device, now_s) for device in range(self._count))

    def close(self) -> None:
        _shutdown(self._nvml)

    def _read_device(self, device: int, now_s: float) -> GpuSample:
        nvml = self._nvml
        lost = (
            nvml.NVMLError_GpuIsLost,
            nvml.NVMLError_ResetRequired,
            nvml.NVMLError_DriverNotLoaded,
            nvml.NVMLError_Uninitialized,
        )
        silent: list[str] = []  # what this device did not tell, and why

        def ask(what: str, call: Callable[[], T]) -> T | None:
            try:
                return call()
            except lost:
                raise
            except nvml.NVMLError as e:
                silent.append(f"{what}: {e}")
                return None

        try:
            handle = self._handle(device)
            rates = ask("utilization", lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
            memory = ask("memory", lambda: self._memory(handle))
            celsius = ask(
                "temperature", lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
            )
            milliwatts = ask("power", lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        except nvml.NVMLError as e:
            self._handles.pop(device, None)  # ask anew next time: a reset device may come back
            name = self._names.get(device, "GPU")
            validity = Validity.LOST if isinstance(e, lost) else Validity.UNKNOWN
            return GpuSample(device, now_s, name, None, None, None, None, None, validity, str(e))
        return GpuSample(
            device=device,
            t_s=now_s,
            name=self._names[device],
            utilization_frac=None if rates is None else rates.gpu / 100,
            memory_used_gib=None if memory is None else memory.used / GIB,
            memory_total_gib=None if memory is None else memory.total / GIB,
            temperature_celsius=None if celsius is None else float(celsius),
            power_watts=None if milliwatts is None else milliwatts / 1000,
            validity=Validity.UNKNOWN if rates is None else Validity.KNOWN,
            error="; ".join(silent),
        )

    def _handle(self, device: int) -> Any:
        if device not in self._handles:
            handle = self._nvml.nvmlDeviceGetHandleByIndex(device)
            name = self._nvml.nvmlDeviceGetName(handle)
            self._names[device] = name.decode() if isinstance(name, bytes) else name  # bytes before 11.5
            self._handles[device] = handle
        return self._handles[device]

    def _memory(self, handle: Any) -> Any:
        """Version 2 leaves the driver's reserve out of `used`, as nvidia-smi does; old drivers have only version 1."""
        nvml = self._nvml
        try:
            return nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
        except (nvml.NVMLError_FunctionNotFound, nvml.NVMLError_ArgumentVersionMismatch):
            return nvml.nvmlDeviceGetMemoryInfo(handle)


def _shutdown(nvml: Any) -> None:
    with contextlib.suppress(nvml.NVMLError):  # a driver that is gone already leaves nothing to close
        nvml.nvmlShutdown()
