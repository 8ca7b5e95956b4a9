"""What a failed run tells: whether memory ran out, whether the next run will fail alike, and when to try again."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from areal_sky.core.model import Bundle
from areal_sky.core.taskevents import OutOfMemory

MAX_BACKOFF_S = 600.0
POISON_RUNS = 3  # so many runs in a row that failed alike, on more than one node, are enough
FIRST_MEMORY_GIB = 4.0  # asked for after memory ran out under a task that had asked for none

# Words of PyTorch, CUDA, HIP, JAX, vLLM and SGLang when a device has no memory left.
_GPU_WORDS = re.compile(
    r"(CUDA|HIP|XPU|NPU) out of memory|OutOfMemoryError: .*GPU|CUDA_ERROR_OUT_OF_MEMORY"
    r"|CUDA error: out of memory|RESOURCE_EXHAUSTED: Out of memory|CUBLAS_STATUS_ALLOC_FAILED|NCCL.*out of memory",
    re.IGNORECASE,
)
# Words of Python, the C++ runtime, PyTorch's CPU allocator, the kernel's errno, Ray's memory monitor, our runner.
_HOST_WORDS = re.compile(
    r"\bMemoryError\b|std::bad_alloc|DefaultCPUAllocator: (can't|not enough)|Cannot allocate memory"
    r"|killed due to the node running low on memory|memory pressure|out of memory",
    re.IGNORECASE,
)
# Numbers, addresses and paths differ from run to run.
_CHANGING = re.compile(r"0x[0-9a-fA-F]+|/[\w./-]+|[0-9a-f]{8,}|\d+(\.\d+)?")
_SIGNAL_CODES = frozenset({-9, -15, 137, 143})


@dataclass(frozen=True, slots=True)
class Failure:
    """One run that failed by itself. `signature` is equal for failures of one kind, empty where nothing tells."""

    node_id: str
    signature: str


def out_of_memory(code: int | None, lost: str, words: str) -> OutOfMemory:
    """Which memory ran out, as far as there is evidence.

    `lost` is what the runner or Ray says of the end (the kernel's out-of-memory counter, Ray's memory monitor),
    `words` the last that the rank wrote on stderr. Exit 0 is no failure; SIGKILL alone proves nothing.
    """
    if code == 0:
        return ""
    if _GPU_WORDS.search(words):
        return "gpu"
    return "host" if _HOST_WORDS.search(lost) or _HOST_WORDS.search(words) else ""


def last_line(words: str) -> str:
    """The last line that is not blank, at most its last 200 characters."""
    return next((line.strip() for line in reversed(words.splitlines()) if line.strip()), "")[-200:]


def signature(code: int | None, tail: str, oom: OutOfMemory) -> str:
    """What makes two failures alike: the exit code and the last words without their numbers.

    Empty for what may come from outside: a lost rank, a killed one, memory that may do after more is asked for.
    """
    if code is None or code in _SIGNAL_CODES or oom:
        return ""
    return f"{code}:{_CHANGING.sub('#', tail)[:120]}"


def is_poison(failures: Sequence[Failure]) -> bool:
    """Whether the latest POISON_RUNS failures are of one kind and more than one node saw them."""
    latest = failures[-POISON_RUNS:]
    alike = {f.signature for f in latest}
    return len(latest) == POISON_RUNS and len(alike) == 1 and "" not in alike and len({f.node_id for f in latest}) > 1


def suspect(failures: Sequence[Failure]) -> str | None:
    """The one node where the latest two failures of one kind were: the next run shall be elsewhere, to tell whether
    it is the node or the task. None where there is nothing to tell.
    """
    latest = failures[-2:]
    alike = len(latest) == 2 and latest[0] == latest[1] and latest[0].signature != ""
    return latest[0].node_id if alike else None


def backoff_s(first_s: float, failures: int) -> float:
    """Seconds from the n-th failure (from 1) to the next run: `first_s`, doubled with each, at most MAX_BACKOFF_S."""
    return min(MAX_BACKOFF_S, first_s * 2.0 ** min(failures - 1, 60)) if first_s > 0 else 0.0


def larger(bundle: Bundle, oom: OutOfMemory) -> Bundle | None:
    """What to ask for after memory ran out; None where the bundle cannot ask for more (whole GPUs).

    Doubled each time: a demand within reach is found in log2 of its size runs, at most twice too large.
    """
    if oom == "host":
        return replace(bundle, memory_gib=bundle.memory_gib * 2 or FIRST_MEMORY_GIB)
    if oom == "gpu" and 0 < bundle.gpus < 1:
        return replace(bundle, gpus=min(1.0, bundle.gpus * 2))
    return None
