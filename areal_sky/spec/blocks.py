"""The blocks that are ours: models, scheduling, scaling, spot, budget, telemetry, alerts."""

from __future__ import annotations

import math
import re
from datetime import datetime
from typing import Literal, cast

from areal_sky.errors import InvalidInput
from areal_sky.spec.backends import ROLLOUT_ENGINES, TRAIN_ENGINES, parse_backend
from areal_sky.spec.cluster import (
    AlertSpec,
    BudgetSpec,
    ModelSpec,
    PoolSpec,
    PriorityWeight,
    ScalingSpec,
    SchedulingSpec,
    SpotSpec,
    TelemetrySpec,
)
from areal_sky.spec.fields import Fields, did_you_mean, show, unique
from areal_sky.spec.marks import MapNode, Node, ScalarNode
from areal_sky.units import format_duration, parse_duration_s, suggest_duration

DAY_S = 86400.0
Op = Literal[">", ">=", "<", "<=", "==", "!="]
BUILT_IN_MODEL_TYPES = ("moe", "base")
ALERT_ACTIONS = ("notify", "cordon", "drain", "requeue")

# What the node agents measure (fields of GpuWindow). Names outside `gpu_` are the user's own, from tasks' metrics.
GPU_METRICS = (
    "gpu_utilization_frac",
    "gpu_memory_used_gib",
    "gpu_memory_used_frac",
    "gpu_temperature_celsius",
    "gpu_power_watts",
    "gpu_lost",
)

_ALERT = re.compile(r"\s*([A-Za-z_][\w./-]*)\s*(>=|<=|==|!=|>|<)\s*(-?\d+(?:\.\d+)?(?:e-?\d+)?)\s*", re.ASCII)
_POLICY = re.compile(r"[A-Za-z_][\w-]*|[A-Za-z_][\w.]*:[A-Za-z_]\w*", re.ASCII)
_POLICY_GRAMMAR = "the name of a preset or built-in policy, or module:function"


def read_models(top: Fields, known_types: tuple[str, ...]) -> tuple[ModelSpec, ...]:
    """`known_types` are those that `scheduling.priority` lists, beside moe and base."""
    models: list[ModelSpec] = []
    seen: dict[str, Node] = {}
    for path, item in top.items("models", "a list of models"):
        f = Fields(item, path, top.notes)
        f.hint(type="model_type", backend="train", actor="train", inference="rollout", path="config")
        name = f.required_text("name", "a name for the model")
        model_type = f.text("model_type")
        config, train, rollout = f.text("config"), f.text("train"), f.text("rollout")
        f.finish()
        unique(f, seen, name, "name", "the model name")
        _check_model_type(f, "model_type", model_type, known_types)
        for key, text, engines in (("train", train, TRAIN_ENGINES), ("rollout", rollout, ROLLOUT_ENGINES)):
            if text is not None:
                try:
                    parse_backend(text, engines)
                except InvalidInput as e:
                    f.wrong(f.map.entries[key], f"{f.path(key)}: {e}")
        if name is not None:
            models.append(
                ModelSpec(name=name, model_type=model_type or "base", config=config, train=train, rollout=rollout)
            )
    return tuple(models)


def read_scheduling(top: Fields) -> SchedulingSpec:
    f = top.block("scheduling")
    f.hint(
        policy="strategy",
        weights="priority",
        priorities="priority",
        ageing="ageing_per_hour",
        aging="ageing_per_hour",
        aging_per_hour="ageing_per_hour",
    )
    default = SchedulingSpec()
    strategy = _policy(f, "strategy")
    ageing = f.number("ageing_per_hour", "a number, at least 0", lambda v: v >= 0)
    priority = _priority(f)
    pools = _pools(f, tuple(p.model_type for p in priority))
    f.finish()
    return SchedulingSpec(
        strategy=strategy or default.strategy,
        priority=priority,
        pools=pools,
        ageing_per_hour=default.ageing_per_hour if ageing is None else ageing,
    )


def _priority(f: Fields) -> tuple[PriorityWeight, ...]:
    """A list of {model_type, weight}, or the mapping {moe: 1.5, base: 1.0} that says the same."""
    node = f.map.entries.get("priority")
    expected = "a weight above 0"
    found: list[PriorityWeight] = []
    if isinstance(node, MapNode):
        weights = f.block("priority")  # of model types, so no key is unknown
        for name in node.entries:
            weight = weights.number(name, expected, lambda v: v > 0)
            if not weights.has(name):
                weights.wrong(weights.key_at(name), f"{weights.path(name)} has no weight, expected {expected}")
            elif weight is not None:
                found.append(PriorityWeight(model_type=name, weight=weight))
        return tuple(found)
    seen: dict[str, Node] = {}
    for path, item in f.items("priority", "a list of {model_type, weight} or a mapping of model type to weight"):
        entry = Fields(item, path, f.notes)
        entry.hint(type="model_type", model="model_type", name="model_type", priority="weight")
        model_type = entry.required_text("model_type", "a model type such as moe or base")
        weight = entry.number("weight", expected, lambda v: v > 0)
        if isinstance(item, MapNode) and not entry.has("weight"):
            entry.wrong(item, f"{path} has no `weight`, expected {expected}")
        entry.finish()
        unique(entry, seen, model_type, "model_type", "the model type")
        if model_type is not None and weight is not None:
            found.append(PriorityWeight(model_type=model_type, weight=weight))
    return tuple(found)


def _pools(f: Fields, known_types: tuple[str, ...]) -> tuple[PoolSpec, ...]:
    pools: list[PoolSpec] = []
    seen: dict[str, Node] = {}
    for path, item in f.items("pools", "a list of pools"):
        p = Fields(item, path, f.notes)
        p.hint(min_gpus="guaranteed_gpus", guaranteed="guaranteed_gpus", max="max_gpus", type="model_type")
        name = p.required_text("name", "a name for the pool")
        model_type = p.required_text("model_type", "the model type whose tasks it serves")
        expected = "a number of GPUs, at least 0"
        guaranteed = p.number("guaranteed_gpus", expected, lambda v: v >= 0) or 0
        most = p.number("max_gpus", expected, lambda v: v >= 0)
        borrow = p.boolean("borrow")
        p.finish()
        unique(p, seen, name, "name", "the pool name")
        _check_model_type(p, "model_type", model_type, known_types)
        if most is not None and guaranteed > most:
            p.wrong(
                p.map.entries["guaranteed_gpus"],
                f"{path}: guaranteed_gpus {guaranteed:g} is above max_gpus {most:g}, expected at most that",
            )
        if name is not None and model_type is not None:
            pools.append(
                PoolSpec(
                    name=name,
                    model_type=model_type,
                    guaranteed_gpus=guaranteed,
                    max_gpus=most,
                    borrow=True if borrow is None else borrow,
                )
            )
    return tuple(pools)


def read_scaling(top: Fields) -> ScalingSpec:
    f = top.block("scaling")
    f.hint(strategy="policy", utilization="target_utilization", cooldown_s="cooldown", idle_s="idle")
    default = ScalingSpec()
    policy = _policy(f, "policy")
    target = f.number(
        "target_utilization", "a share of the GPUs above 0 and at most 1, such as 0.85", lambda v: 0 < v <= 1
    )
    cooldown = f.duration_s("cooldown", 0, DAY_S)
    idle = f.duration_s("idle", 0, 7 * DAY_S)
    options = f.block("options")
    f.finish()
    return ScalingSpec(
        policy=policy or default.policy,
        target_utilization=target or default.target_utilization,
        cooldown_s=default.cooldown_s if cooldown is None else cooldown,
        idle_s=default.idle_s if idle is None else idle,
        options={key: options.raw(key) for key in options.map.entries},
    )


def read_spot(top: Fields) -> SpotSpec:
    f = top.block("spot")
    f.hint(max_price_frac="max_spot_price_frac", max_price="max_spot_price_frac", strategy="policy")
    policy = _policy(f, "policy")
    frac = f.number(
        "max_spot_price_frac", "a share of the on-demand price above 0 and at most 1, such as 0.6", lambda v: 0 < v <= 1
    )
    f.finish()
    return SpotSpec(policy=policy or SpotSpec().policy, max_spot_price_frac=frac)


def read_budget(top: Fields, now_s: float | None) -> BudgetSpec:
    f = top.block("budget")
    f.hint(
        hourly="max_hourly_usd",
        max_hourly="max_hourly_usd",
        total="max_total_usd",
        max_total="max_total_usd",
        max_hourly_cost="max_hourly_usd",
        max_cost="max_total_usd",
        until="deadline",
    )
    hourly, total, deadline = f.usd("max_hourly_usd"), f.usd("max_total_usd"), _deadline(f, now_s)
    f.finish()
    return BudgetSpec(max_hourly_usd=hourly, max_total_usd=total, deadline_s=deadline)


def _deadline(f: Fields, now_s: float | None) -> float | None:
    """A moment with its time zone, or a duration from now on. Unix seconds."""
    node = f.take("deadline")
    if node is None:
        return None
    expected = "a moment such as 2030-12-24T08:00:00Z, or a duration from now such as 12h"
    wrong = f"{f.path('deadline')} is {show(node)}"
    if not isinstance(node, ScalarNode) or not isinstance(node.value, str):
        f.wrong(node, f"{wrong}, expected {expected}")
        return None
    text = node.text.strip()
    if re.match(r"\d{4}-", text, re.ASCII):
        try:
            moment = datetime.fromisoformat(text)
            at_s = moment.timestamp() if moment.tzinfo else None
        except (ValueError, OverflowError):
            f.wrong(node, f"{wrong}, which is no date and time, expected {expected}")
            return None
        if at_s is None:
            whole = text if "T" in text or " " in text else f"{text}T00:00:00"
            f.wrong(node, f"{wrong} without a time zone, expected {expected}, did you mean `{whole}Z`?")
            return None
        if now_s is not None and at_s <= now_s:
            ago = format_duration(now_s - at_s, parts=2)
            f.wrong(node, f"{wrong}, which was {ago} ago, expected a moment to come")
            return None
        return at_s
    try:
        after_s = parse_duration_s(text)
    except InvalidInput:
        hint = suggest_duration(text)
        f.wrong(node, f"{wrong}, expected {expected}" + (f", did you mean `{hint}`?" if hint else ""))
        return None
    if after_s <= 0 or after_s > 3660 * DAY_S:
        f.wrong(node, f"{wrong}, expected {expected}")
        return None
    if now_s is None:
        f.wrong(node, f"{wrong}, which counts from now, expected a moment: this is read without a clock")
        return None
    return now_s + after_s


def read_telemetry(top: Fields) -> TelemetrySpec:
    f = top.block("telemetry")
    f.hint(interval="normal_interval", critical="critical_interval", normal="normal_interval")
    default = TelemetrySpec()
    # Below 10 ms the sampler itself would load the machine; NVML's own window is 1/6 s at best.
    critical = f.duration_s("critical_interval", 0.01, 60) or default.critical_interval_s
    normal = f.duration_s("normal_interval", 0.01, 3600) or max(default.normal_interval_s, critical)
    f.finish()
    if critical > normal:
        f.wrong(
            f.map.entries["critical_interval"],
            f"telemetry.critical_interval {format_duration(critical)} is longer than normal_interval "
            f"{format_duration(normal)}, expected at most that",
        )
    return TelemetrySpec(critical_interval_s=critical, normal_interval_s=normal)


def read_alerts(top: Fields) -> tuple[AlertSpec, ...]:
    alerts: list[AlertSpec] = []
    for path, item in top.items("alerts", "a list of alerts"):
        f = Fields(item, path, top.notes)
        f.hint(condition="when", metric="when", duration="for", action="then", do="then")
        when = f.required_text("when", "a comparison such as gpu_temperature_celsius > 88")
        for_s = f.duration_s("for", 0, DAY_S) or 0.0
        then = f.choice("then", ALERT_ACTIONS) or "notify"
        f.finish()
        match = _ALERT.fullmatch(when) if when is not None else None
        if match and not math.isfinite(float(match[3])):
            match = None
        if when is not None and match is None:
            f.wrong(
                f.map.entries["when"],
                f"{f.path('when')} is {show(f.map.entries['when'])}, expected METRIC > NUMBER, "
                "such as gpu_temperature_celsius > 88 (or >=, <, <=, ==, !=)",
            )
        if when is None or match is None:
            continue
        metric = match[1]
        if metric.startswith("gpu_") and metric not in GPU_METRICS:
            f.wrong(
                f.map.entries["when"],
                f"{f.path('when')}: `{metric[:60]}` is not measured, expected one of: "
                f"{', '.join(GPU_METRICS)}{did_you_mean(metric, GPU_METRICS)}",
            )
        alerts.append(
            AlertSpec(
                when=when, metric=metric, op=cast(Op, match[2]), threshold=float(match[3]), for_s=for_s, then=then
            )
        )
    return tuple(alerts)


def _policy(f: Fields, key: str) -> str | None:
    text = f.text(key, _POLICY_GRAMMAR)
    if text is None or _POLICY.fullmatch(text):
        return text
    node = f.map.entries[key]
    f.wrong(node, f"{f.path(key)} is {show(node)}, expected {_POLICY_GRAMMAR}")
    return None


def _check_model_type(f: Fields, key: str, model_type: str | None, known_types: tuple[str, ...]) -> None:
    known = tuple(dict.fromkeys((*known_types, *BUILT_IN_MODEL_TYPES)))
    if model_type is not None and model_type not in known:
        f.wrong(
            f.map.entries[key],
            f"{f.path(key)} is `{model_type[:40]}`, which scheduling.priority does not list, "
            f"expected one of: {', '.join(known)}{did_you_mean(model_type, known)}",
        )
