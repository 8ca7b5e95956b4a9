"""The door to PyTorch's memory allocator: the only `import torch`."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

GIB = 1024**3


@dataclass(frozen=True, slots=True)
class TorchMemory:
    """What this process's PyTorch holds of one GPU. `reserved_gib` includes `allocated_gib` and its cached blocks."""

    device: int  # the machine's number of the GPU, as NVML counts
    allocated_gib: float
    reserved_gib: float


def torch_memory(load: bool = False) -> dict[int, TorchMemory]:
    """Per GPU, what the PyTorch of this very process holds; empty where it holds nothing.

    Looks only if the process has already imported torch (or `load` asks to) and has started CUDA itself: looking
    must cost neither seconds of import nor a CUDA context of some hundred MiB.
    """
    if not load and "torch" not in sys.modules:
        return {}
    try:
        import torch

        if not torch.cuda.is_available() or not torch.cuda.is_initialized():
            return {}
        count = torch.cuda.device_count()
        read = [(i, torch.cuda.memory_allocated(i), torch.cuda.memory_reserved(i)) for i in range(count)]
    except (ImportError, AttributeError, RuntimeError):  # absent, half imported, or its CUDA is broken
        return {}
    return {_machine_index(i): TorchMemory(_machine_index(i), a / GIB, r / GIB) for i, a, r in read}


def as_metrics() -> dict[str, float]:
    """The same as values that a task reports of itself; empty where this process holds nothing."""
    held: dict[str, float] = {}
    for device, memory in torch_memory().items():
        held[f"gpu{device}_memory_allocated_gib"] = memory.allocated_gib
        held[f"gpu{device}_memory_cached_gib"] = memory.reserved_gib
    return held


def _machine_index(ordinal: int) -> int:
    """CUDA renumbers the devices that CUDA_VISIBLE_DEVICES lists. Numbers are undone here; UUIDs are left alone."""
    visible = [v.strip() for v in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if v.strip()]
    if ordinal < len(visible) and visible[ordinal].isdigit():
        return int(visible[ordinal])
    return ordinal
