"""Which parallelism fits: the smallest on a kind of GPU, and the nearest to one that does not."""

from __future__ import annotations

import math
from collections.abc import Iterator

from areal_sky.core.architecture import Architecture
from areal_sky.core.memory import check_parallelism, estimate
from areal_sky.core.memory_terms import Stage
from areal_sky.errors import InvalidInput
from areal_sky.spec.backends import ROLLOUT_ENGINES, Backend
from areal_sky.spec.memory import Settings

MAX_GPUS = 1024
# Share of a GPU's usable memory up to which an estimate counts as fitting: the rest is the estimate's own error.
COMFORT_FRAC = 0.92


def smallest(
    model: Architecture,
    stage: Stage,
    engine: str,
    usable_gib: float,
    settings: Settings | None = None,
    *,
    gpus_per_node: int = 8,
    correction: float = 1.0,
    max_gpus: int = MAX_GPUS,
) -> Backend | None:
    """The parallelism on the fewest GPUs of that memory that fits with some room; None up to `max_gpus`.

    Of a rollout it is one instance: more only add. Among equals data parallelism is preferred, then tensor, context,
    expert and pipeline parallelism. Tensor parallelism stays within a node of `gpus_per_node`.
    """
    for b in _candidates(model, stage, engine, gpus_per_node, max_gpus):
        if estimate(model, stage, b, settings, correction).device_gib <= COMFORT_FRAC * usable_gib:
            return b
    return None


def nearest(
    model: Architecture,
    stage: Stage,
    asked: Backend,
    usable_gib: float,
    settings: Settings | None = None,
    *,
    gpus_per_node: int = 8,
    correction: float = 1.0,
    max_gpus: int = MAX_GPUS,
) -> Backend | None:
    """The parallelism nearest to `asked` that fits: on as many GPUs, else on the fewest more. None where none does."""
    if stage == "rollout":
        one = smallest(
            model, stage, asked.engine, usable_gib, settings,
            gpus_per_node=gpus_per_node, correction=correction, max_gpus=max_gpus,
        )  # fmt: skip
        if one is None:
            return None
        data = max(1, asked.gpus // one.gpus)
        return Backend(one.engine, data, one.tensor, one.pipeline)
    found: list[Backend] = []
    for b in _candidates(model, stage, asked.engine, gpus_per_node, max_gpus):
        if b.gpus < asked.gpus or (found and b.gpus > found[0].gpus):
            continue
        if estimate(model, stage, b, settings, correction).device_gib <= COMFORT_FRAC * usable_gib:
            found.append(b)
    return min(found, key=lambda b: _distance(asked, b), default=None)


def _candidates(a: Architecture, stage: Stage, engine: str, per_node: int, max_gpus: int) -> Iterator[Backend]:
    """Every parallelism in powers of two that the model allows, fewest GPUs first."""
    tensors = [t for t in _powers(max(1, per_node)) if a.heads % t == 0]
    pipelines = _powers(min(16, a.layers)) if engine != "fsdp" else [1]
    rollout = engine in ROLLOUT_ENGINES
    contexts = [1] if rollout else _powers(8)
    experts = [e for e in _powers(a.experts) if a.experts % e == 0] if a.experts and engine == "megatron" else [1]
    datas = [1] if rollout else _powers(max_gpus)
    made: list[Backend] = []
    for t in tensors:
        for p in pipelines:
            for c in contexts:
                for d in (d for d in datas if d * t * p * c <= max_gpus):
                    fit = (e for e in experts if (d * t * c) % e == 0)
                    made += [Backend(engine, d, t, p, c, e) for e in fit]
    for b in sorted(made, key=lambda b: (b.gpus, b.pipeline, b.context, b.tensor, b.expert)):
        try:
            check_parallelism(a, stage, b)
        except InvalidInput:
            continue
        yield b


def _powers(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`."""
    return [2**i for i in range(int(math.log2(max(1, most))) + 1)]


def _distance(a: Backend, b: Backend) -> float:
    pairs = (
        (a.data, b.data), (a.tensor, b.tensor), (a.pipeline, b.pipeline), (a.context, b.context), (a.expert, b.expert)
    )  # fmt: skip
    return sum(abs(math.log2(x / y)) for x, y in pairs)
