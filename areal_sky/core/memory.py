"""How much memory a model takes: per device, per stage, per parallelism, part by part.

`estimate` is pure arithmetic; every part names its formula's source. What it assumes is in `Settings`; what a running
task really took corrects it (core/memory_peaks.py). Whether it fits a GPU is judged in core/memory_check.py.
"""

from __future__ import annotations

from dataclasses import replace

from areal_sky.core import memory_rollout, memory_train
from areal_sky.core.architecture import Architecture
from areal_sky.core.memory_terms import Estimate, Stage, gib
from areal_sky.errors import InvalidInput
from areal_sky.spec.backends import ENGINES, ROLLOUT_ENGINES, TRAIN_ENGINES, Backend, parse_backend
from areal_sky.spec.fields import did_you_mean
from areal_sky.spec.memory import Settings

ADVICE = {
    "rollout": "an engine that generates: " + " or ".join(ROLLOUT_ENGINES),
    "train": "an engine that trains: " + ", ".join(TRAIN_ENGINES),
    "inference": "an engine that trains (it computes with its own parallelism): " + ", ".join(TRAIN_ENGINES),
}


def estimate(
    model: Architecture, stage: Stage, backend: Backend | str, settings: Settings | None = None, correction: float = 1.0
) -> Estimate:
    """What the fullest device takes at its peak.

    `stage`: train, rollout, or inference (reference and reward models: forward passes with a training engine).
    `correction` is a factor from observed peaks. Raises InvalidInput for a backend that cannot do the stage, or whose
    parallelism the model does not allow.
    """
    s = settings or Settings()
    b = parse_backend(backend, ENGINES) if isinstance(backend, str) else backend
    check_parallelism(model, stage, b)
    if stage == "rollout":
        parts = memory_rollout.device_parts(model, b, s)
        host, once = memory_rollout.host_parts(model, s), 0.0
    else:
        training = stage == "train"
        parts = memory_train.states(model, b, s) if training else []
        parts += memory_train.activations(model, b, s) if training else memory_train.forward(model, b, s)
        parts += memory_train.gathered(model, b, s, training and not s.lora_rank)
        parts += memory_train.overheads(b, parts)
        # One process gathers the whole model in bfloat16 when weights are saved.
        host, once = memory_train.host(model, b, s), gib(model.parameters, 2) if training else 0.0
    return Estimate(
        model.name, stage, str(b), b.gpus, tuple(p for p in parts if p.gib > 0), tuple(host), once, correction
    )


def least(model: Architecture, stage: Stage, backend: Backend | str, settings: Settings | None = None) -> Estimate:
    """The least that the same allocation could be made to take: above it no setting helps, only other parallelism."""
    s = (settings or Settings()).leanest()
    found = estimate(model, stage, backend, s)
    # What is only assumed must not refuse anything.
    sure = tuple(p for p in found.parts if p.name not in ("fragmentation", "CUDA graphs", "workspace"))
    return replace(found, parts=sure)


def check_parallelism(a: Architecture, stage: Stage, b: Backend) -> None:
    """Raises InvalidInput, listing every reason, where the model cannot be split like that."""
    engines = ROLLOUT_ENGINES if stage == "rollout" else TRAIN_ENGINES
    if b.engine not in engines:
        raise InvalidInput(f"`{b}` cannot do {stage}, expected {ADVICE[stage]}{did_you_mean(b.engine, engines)}")
    wrong: list[str] = []
    if a.heads % b.tensor:
        wrong.append(f"t{b.tensor} does not divide its {a.heads} attention heads")
    if b.pipeline > a.layers:
        wrong.append(f"p{b.pipeline} is more than its {a.layers} layers")
    if b.expert > 1 and not a.experts:
        wrong.append(f"e{b.expert} needs experts, and it has none")
    elif b.expert > 1 and a.experts % b.expert:
        wrong.append(f"e{b.expert} does not divide its {a.experts} experts")
    if wrong:
        raise InvalidInput(f"{a.name} cannot run as `{b}`: {'; '.join(wrong)}")
