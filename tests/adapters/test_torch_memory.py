"""PyTorch's memory is told only where this process holds some; looking has no price."""

from __future__ import annotations

import subprocess
import sys
import types
from contextlib import contextmanager

import pytest

from areal_sky import task
from areal_sky.adapters.torch_memory import TorchMemory, torch_memory

GIB = 1024**3


@pytest.fixture
def torch(monkeypatch):
    """A stand-in with the functions of torch.cuda that are asked."""
    cuda = types.SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: True, device_count=lambda: 2,
        memory_allocated=lambda i: (i + 1) * GIB, memory_reserved=lambda i: (i + 1) * 2 * GIB,
    )  # fmt: skip
    module = types.ModuleType("torch")
    module.cuda = cuda  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", module)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return cuda


def test_per_device(torch):
    assert torch_memory() == {0: TorchMemory(0, 1.0, 2.0), 1: TorchMemory(1, 2.0, 4.0)}


def test_devices_are_numbered_as_the_machine_does(torch, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6, 3")
    assert torch_memory() == {6: TorchMemory(6, 1.0, 2.0), 3: TorchMemory(3, 2.0, 4.0)}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8f6e,GPU-77aa")
    assert list(torch_memory()) == [0, 1]


def test_a_process_without_cuda_is_left_alone(torch, monkeypatch):
    monkeypatch.setattr(torch, "is_initialized", lambda: False)
    monkeypatch.setattr(torch, "device_count", lambda: pytest.fail("would start CUDA"))
    assert torch_memory() == {}


def test_broken_cuda_is_no_error(torch, monkeypatch):
    def broken(i):
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch, "memory_allocated", broken)
    assert torch_memory() == {}


def test_torch_is_not_imported_by_looking():
    script = (
        "import sys; from areal_sky.adapters.torch_memory import torch_memory as t;"
        "assert t() == {} and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_task_tells_of_it_with_its_metrics(torch, monkeypatch):
    told = []

    @contextmanager
    def gateway():
        yield types.SimpleNamespace(track_metrics=lambda *args: told.append(args))

    monkeypatch.setattr(task, "connector", lambda _: gateway)
    monkeypatch.setenv("AREAL_SKY_TASK_ID", "t1")
    monkeypatch.setenv("RANK", "3")
    task.track_runtime_metrics("t1", {"loss": 0.5, "gpu1_memory_cached_gib": 9.0})
    held = {"gpu0_memory_allocated_gib": 1.0, "gpu0_memory_cached_gib": 2.0, "gpu1_memory_allocated_gib": 2.0}
    assert told == [("t1", {**held, "loss": 0.5, "gpu1_memory_cached_gib": 9.0}, 3)]
    task.track_runtime_metrics("another", {"loss": 0.5})
    assert told[1] == ("another", {"loss": 0.5}, None), "of another task this process knows nothing"
