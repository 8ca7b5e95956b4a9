"""Whether models fit the GPUs they are to run on: judged before anything costs money, and when a task is submitted.

Impossible (refused): even the least that the allocation could be made to take (core/memory.least) is above the GPU's
memory by a clear margin. Over or tight (warned): as assumed, it does not fit, or only just.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum

from areal_sky.core.architecture import Architecture
from areal_sky.core.memory import estimate, least
from areal_sky.core.memory_terms import MemoryReport, ModelNeed, Stage
from areal_sky.core.model import GroupPlan, NodeShape
from areal_sky.core.model_table import find_model, is_known
from areal_sky.core.parallelism import COMFORT_FRAC, nearest
from areal_sky.errors import InvalidInput, Refused
from areal_sky.spec.accelerators import find
from areal_sky.spec.backends import ENGINES, parse_backend
from areal_sky.spec.cluster import ClusterSpec, ModelSpec

# How far the least must be above a GPU's memory before an allocation is refused.
CLEAR_FRAC = 1.05
# What of the advertised memory programs see. GDDR cards give a sixteenth to error correction: 44.4 GiB of an L40S's 48,
# 22.1 of an A10G's 24; HBM cards lose little: 79.2 of an H100's 80, 139.8 of an H200's 141, 15.8 of a V100's 16
# (vLLM's and PyTorch's messages in vllm pull request 10511 and issue 15815).
HBM_FRAC, GDDR_FRAC = 0.985, 0.92
_GDDR = frozenset(
    ("A10", "A10G", "A16", "A40", "A4000", "A5000", "A6000", "L4", "L40", "L40S", "T4", "T4g", "RTX4000-Ada",
     "RTX5000-Ada", "RTX6000-Ada", "RTX6000Ada", "RTX8000", "RTXA4000", "RTXA5000", "RTXA6000")
)  # fmt: skip

KIND_STAGE: dict[str, Stage] = {"train": "train", "rollout": "rollout", "eval": "rollout", "reward": "inference"}


class Level(IntEnum):
    """The better, the lower."""

    FITS = 0
    TIGHT = 1
    OVER = 2
    IMPOSSIBLE = 3


def usable_gib(shape: NodeShape) -> float | None:
    """What programs may use of one of the shape's GPUs, or None where its memory is not known."""
    known = find(shape.accelerator) if shape.accelerator else None
    total = shape.gpu_memory_gib or (known.memory_gib if known else None)
    if not shape.gpus or not total:
        return None
    return total * (GDDR_FRAC if known and known.name in _GDDR else HBM_FRAC)


def judge(need: ModelNeed, usable: float, correction: float = 1.0) -> Level:
    """How a need stands to `usable` GiB of a GPU; `correction` is what observed peaks taught."""
    if need.least_gib > CLEAR_FRAC * usable:
        return Level.IMPOSSIBLE
    expected = correction * need.device_gib
    if expected > usable:
        return Level.OVER
    return Level.FITS if expected <= COMFORT_FRAC * usable else Level.TIGHT


def architecture_of(model: ModelSpec, files: Mapping[str, Architecture]) -> Architecture:
    """From `files` (config.json files that were read, by model name), else the table. Raises InvalidInput."""
    if model.name in files:
        return files[model.name]
    if model.config is None and not is_known(model.name):
        raise InvalidInput(f"`{model.name}` is not in the table of common models: give it a `config`")
    return find_model(model.config or model.name).architecture


def needs_of(model: ModelSpec, architecture: Architecture) -> tuple[ModelNeed, ...]:
    """What each of its backends takes per device. Raises InvalidInput for a parallelism the model does not allow."""
    found: list[ModelNeed] = []
    pairs: tuple[tuple[Stage, str | None], ...] = (("train", model.train), ("rollout", model.rollout))
    for stage, text in pairs:
        if text is None:
            continue
        b = parse_backend(text, ENGINES)
        expected = estimate(architecture, stage, b, model.memory)
        floor = least(architecture, stage, b, model.memory)
        found.append(
            ModelNeed(
                model.name, stage, str(b), b.gpus, b.gpus_per_replica if stage == "rollout" else b.gpus,
                round(expected.device_gib, 2), round(floor.device_gib, 2), round(expected.host_gib, 2),
                round(expected.host_once_gib, 2),
            )
        )  # fmt: skip
    return tuple(found)


def check(spec: ClusterSpec, groups: Sequence[GroupPlan], files: Mapping[str, Architecture]) -> MemoryReport:
    """What the spec's models need, and whether the planned groups have it."""
    report = MemoryReport()
    for model in spec.models:
        if model.memory_check == "skip" or not (model.train or model.rollout):
            continue
        try:
            architecture = architecture_of(model, files)
            needs = needs_of(model, architecture)
        except InvalidInput as e:
            report = report.add(warnings=(f"model {model.name}: memory not checked: {e}",))
            continue
        report = report.add(needs=needs)
        for need in needs:
            # Pretend machines of this computer cost nothing: only say so.
            soft = model.memory_check == "warn" or spec.is_local
            line, bad = _one(need, model, architecture, groups)
            if not bad:
                report = report.add(lines=(line,))
            elif bad is Level.IMPOSSIBLE and not soft:
                report = report.add(refusals=(line,))
            else:
                report = report.add(warnings=(line,))
    return report


def refuse(report: MemoryReport) -> None:
    """Raises Refused with every allocation that cannot fit."""
    if report.refusals:
        hint = "`memory: {check: warn}` in the model brings it up nevertheless"
        raise Refused("\n".join((*report.refusals, hint)))


def check_task(
    needs: Iterable[ModelNeed],
    model: str | None,
    kind: str,
    gpus: float,
    shapes: Sequence[NodeShape],
    corrections: Mapping[tuple[str, Stage], float] | None = None,
) -> tuple[str, str]:
    """(refusal, warning) for a task of that model and kind; both empty where nothing speaks against it.

    `gpus`: those of all its bundles together; 0 or less than one says nothing and is not judged. `shapes`: the nodes
    that it may run on. `corrections` by (model, stage), from observed peaks. A `driver` is judged by all stages.
    """
    wanted = [n for n in needs if n.model == model and (kind == "driver" or KIND_STAGE.get(kind) == n.stage)]
    refusals: list[str] = []
    warnings: list[str] = []
    for need in wanted:
        usable = [(u, s) for s in shapes if (u := usable_gib(s)) is not None]
        if not usable or gpus < 1:
            continue
        most, shape = max(usable, key=lambda x: x[0])
        factor = (corrections or {}).get((need.model, need.stage), 1.0)
        text = f"{_words(need, factor)} {_against(shape, most)}"
        level = judge(need, most, factor)
        if kind != "driver" and gpus < need.gpus_per_replica:
            warnings.append(f"{need.model}: {need.stage} as {need.backend} takes {need.gpus_per_replica} GPUs, "
                            f"the task asks for {gpus:g}")  # fmt: skip
        elif level is Level.IMPOSSIBLE:
            refusals.append(f"{need.model} cannot fit: {text}")
        elif level is not Level.FITS:
            warnings.append(f"{need.model} {'is tight' if level is Level.TIGHT else 'may not fit'}: {text}")
    return "; ".join(refusals), "; ".join(warnings)


# ---------------------------------------------------------------- how


def _one(
    need: ModelNeed, model: ModelSpec, architecture: Architecture, groups: Sequence[GroupPlan]
) -> tuple[str, Level]:
    """A sentence about one need, and how bad it is with the best GPU of the cluster."""
    name = f"{need.model} {need.stage} {need.backend}"
    ranked = sorted(
        ((judge(need, u), -u, g.name, g) for g in groups if (u := usable_gib(g.shape)) is not None),
        key=lambda x: x[:3],
    )
    total = sum(map(_gpus, groups))
    if need.gpus > total:
        return f"{name}: it takes {need.gpus} GPUs and the cluster has {total:g} at its largest", Level.IMPOSSIBLE
    able = [x for x in ranked if _gpus(x[3]) >= need.gpus_per_replica]
    if ranked and not able:
        most = max(map(_gpus, groups))
        return f"{name}: it takes {need.gpus_per_replica} GPUs together and no group has more than {most:g}", Level.OVER
    ranked = able
    if not ranked:
        return f"{name}: {_words(need)}; the memory of this cluster's GPUs is not known", Level.FITS
    level, less, _, group = ranked[0]
    text = f"{name}: {_words(need)} {_against(group.shape, -less)}"
    if level in (Level.FITS, Level.TIGHT):
        others = [f"{g.name} ({g.shape.accelerator})" for lv, _, _, g in ranked[1:] if lv >= Level.OVER]
        rest = f"; too much for {', '.join(others)}" if others else ""
        where = f"fits {group.name}" if level is Level.FITS else f"is tight on {group.name}"
        host = need.host_gib * min(group.shape.gpus, need.gpus) + need.host_once_gib
        if host > group.shape.memory_gib:
            where += f", but takes {host:.0f} GiB of a node's own memory, which has {group.shape.memory_gib:g}"
            level = Level.TIGHT
        return f"{text}: {where}{rest}", level
    better = nearest(
        architecture, need.stage, parse_backend(need.backend, ENGINES), -less, model.memory,
        gpus_per_node=max(1, int(group.shape.gpus)),
    )  # fmt: skip
    verdict = "cannot fit" if level is Level.IMPOSSIBLE else "does not fit as assumed"
    hint = f", {better} would" if better else ", nor would any parallelism of this engine"
    return f"{text}: {verdict}{hint}", level


def _gpus(g: GroupPlan) -> float:
    """At its largest."""
    return g.max_replicas * g.nodes_per_replica * g.shape.gpus


def _words(need: ModelNeed, correction: float = 1.0) -> str:
    return f"{correction * need.device_gib:.0f} GiB a GPU ({need.least_gib:.0f} at the least)"


def _against(shape: NodeShape, usable: float) -> str:
    return f"of {usable:.0f} on {shape.accelerator or 'its GPU'}"
