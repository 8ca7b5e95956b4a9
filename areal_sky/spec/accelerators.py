"""Accelerators: their canonical names and memory, and every form in which SkyPilot lets one ask for them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cache

from areal_sky.errors import InvalidInput
from areal_sky.spec import accelerator_table as table
from areal_sky.spec.cluster import AcceleratorAsk
from areal_sky.spec.fields import did_you_mean
from areal_sky.units import parse_gib

# The largest node sold holds 16 (GCP a2-megagpu-16g, AWS trn2.48xlarge), a PCIe chassis of one's own about 20;
# beyond 64 somebody has counted a cluster's GPUs instead of a node's.
MAX_PER_NODE = 64

ASK_GRAMMAR = "NAME, NAME:COUNT, 80GB:COUNT or 80GB+:COUNT per node, such as H100:8"

# SkyPilot's own test for "this is a memory size, not a name" (resources.py, _parse_accelerators_from_str).
_MEMORY = re.compile(r"([0-9]+[GMT]B)(\+?)", re.IGNORECASE | re.ASCII)
_COUNT = re.compile(r"\d+(?:\.\d+)?|\.\d+", re.ASCII)
_TPU_SLICE = re.compile(r"(tpu-v\d+[a-z]*)-(\d+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Accelerator:
    """`memory_gib` is per device, None for TPUs. `vendor`: nvidia, amd, intel, aws or google."""

    name: str
    vendor: str
    memory_gib: float | None


def find(name: str) -> Accelerator | None:
    """The accelerator of that name, in any case; TPU slices (`tpu-v6e-8`) included. None when no catalog has it."""
    known = _by_lower_name().get(name.lower())
    if known:
        return known
    if name.lower() in table.TPU_ON_GKE:
        return Accelerator(name.lower(), "google", None)
    slice_ = _TPU_SLICE.fullmatch(name.lower())
    if slice_ and int(slice_[2]) > 0:
        generation = table.TPU_OTHER_NAMES.get(slice_[1], slice_[1])
        if generation in table.TPU_GENERATIONS:
            return Accelerator(f"{generation}-{int(slice_[2])}", "google", None)
    return None


def known_names() -> tuple[str, ...]:
    """Every canonical name, TPU generations included."""
    return (*(a.name for a in _by_lower_name().values()), *table.TPU_GENERATIONS, *table.TPU_ON_GKE)


def matching(ask: AcceleratorAsk) -> tuple[str, ...]:
    """The canonical names that satisfy an ask: its own name, or all with the memory (and vendor) it wants."""
    if ask.name is not None:
        return (ask.name,)
    low = ask.min_memory_gib or 0.0
    high = math.inf if ask.max_memory_gib is None else ask.max_memory_gib
    return tuple(
        a.name
        for a in _by_lower_name().values()
        if a.memory_gib is not None and low <= a.memory_gib <= high and ask.vendor in (None, a.vendor)
    )


def parse_ask(text: str, count: float | None = None, any_name: bool = False) -> AcceleratorAsk:
    """An ask from SkyPilot's string form: `V100:8`, `V100`, `V100:0.5`, `80GB+:8`, `nvidia:80GB:8`, `tpu-v6e:8`.

    `count` is given when it stood apart, as in {V100: 8}; then `text` may not hold one. `any_name` takes names that no
    catalog has, as Kubernetes, Slurm and SSH pools may have their own. Raises InvalidInput.
    """
    parts = [part.strip() for part in text.split(":")]
    if not all(parts) or len(parts) > 3:
        raise InvalidInput(f"`{text[:40]}` is not an accelerator, expected {ASK_GRAMMAR}")
    vendor: str | None = None
    if len(parts) > 1 and _MEMORY.fullmatch(parts[1]) and not _MEMORY.fullmatch(parts[0]):
        vendor = _vendor(parts.pop(0))
    if len(parts) > 2 or (len(parts) == 2 and count is not None):
        twice = " has its count twice" if count is not None else " is not an accelerator"
        raise InvalidInput(f"`{text[:40]}`{twice}, expected {ASK_GRAMMAR}")
    number = count if count is not None else _count(parts[1], text) if len(parts) == 2 else 1.0
    _check_count(number, text)
    memory = _MEMORY.fullmatch(parts[0])
    if memory:
        if number != int(number):
            raise InvalidInput(f"`{text[:40]}` asks for {number:g}, expected a whole count with a memory size")
        gib = parse_gib(memory[1])
        ask = AcceleratorAsk(
            name=None, count=number, min_memory_gib=gib, max_memory_gib=None if memory[2] else gib, vendor=vendor
        )
        if not matching(ask):
            raise InvalidInput(f"`{text[:40]}`: no known accelerator has this memory{_memory_hint(gib, vendor)}")
        return ask
    return _named(parts[0], number, any_name)


def _named(name: str, count: float, any_name: bool) -> AcceleratorAsk:
    lower = name.lower()
    generation = table.TPU_OTHER_NAMES.get(lower, lower)
    if generation in table.TPU_GENERATIONS:  # `tpu-v6e:8` is the slice that SkyPilot calls `tpu-v6e-8`
        if count != int(count):
            raise InvalidInput(f"`{name}` asks for {count:g} cores, expected a whole slice, such as `{generation}-8`")
        return AcceleratorAsk(name=f"{generation}-{int(count)}", count=1.0)
    known = find(name)
    if known is None:
        if any_name:
            return AcceleratorAsk(name=name, count=count)
        raise InvalidInput(
            f"`{name[:40]}` is no accelerator that a catalog has, expected a name as SkyPilot writes it"
            f"{_name_hint(name)}"
        )
    if _TPU_SLICE.fullmatch(known.name) and count != 1:
        raise InvalidInput(
            f"`{name}:{count:g}` asks for {count:g} slices on one node, expected one slice: write "
            f"`{known.name}`, and more nodes for more slices"
        )
    return AcceleratorAsk(name=known.name, count=count)


def _count(text: str, whole: str) -> float:
    if not _COUNT.fullmatch(text):
        raise InvalidInput(f"`{whole[:40]}` has no number after its `:`, expected {ASK_GRAMMAR}")
    return float(text)


def _check_count(count: float, text: str) -> None:
    if not math.isfinite(count) or count <= 0:
        raise InvalidInput(f"`{text[:40]}` asks for {count:g}, expected a count above 0")
    if count > 1 and count != int(count):
        raise InvalidInput(
            f"`{text[:40]}` asks for {count:g}, expected a whole count or a fraction below 1: "
            "a process can share one device or own several, not both"
        )
    tpu = text.lower().startswith("tpu-")
    if count > MAX_PER_NODE and not tpu:
        raise InvalidInput(
            f"`{text[:40]}` asks for {count:g} on one node, expected at most {MAX_PER_NODE}: "
            "the count is per node, more nodes come from num_nodes or replicas"
        )


def _vendor(word: str) -> str:
    vendors = sorted({a.vendor for a in _by_lower_name().values()})
    if word.lower() in vendors:
        return word.lower()
    raise InvalidInput(
        f"`{word[:40]}` is no vendor, expected one of: {', '.join(vendors)}{did_you_mean(word, vendors)}"
    )


def _name_hint(name: str) -> str:
    """The nearest known name. `H100-80GB` is H100, which difflib alone would call A100-80GB."""
    squeezed = re.sub(r"[-_ ]", "", name.lower())
    for known in known_names():
        if re.sub(r"[-_ ]", "", known.lower()) == squeezed:
            return f", did you mean `{known}`?"
    with_memory = re.fullmatch(r"(.+?)[-_ ]?(\d+)G(?:i?B)?", name, re.IGNORECASE | re.ASCII)
    base = find(with_memory[1]) if with_memory else None
    if base and with_memory and base.memory_gib == float(with_memory[2]):
        return f", did you mean `{base.name}`?"
    return did_you_mean(name, known_names(), cutoff=0.5)


def _memory_hint(gib: float, vendor: str | None) -> str:
    sizes = sorted({a.memory_gib for a in _by_lower_name().values() if a.memory_gib and vendor in (None, a.vendor)})
    nearest = min(sizes, key=lambda s: abs(s - gib))
    return f", expected one of {', '.join(f'{s:g}GB' for s in sizes)}, did you mean `{nearest:g}GB`?"


@cache
def _by_lower_name() -> dict[str, Accelerator]:
    rows = ((table.NVIDIA, "nvidia"), (table.AMD, "amd"), (table.INTEL, "intel"), (table.AWS, "aws"))
    return {n.lower(): Accelerator(n, vendor, gib) for names, vendor in rows for n, gib in names.items()}
