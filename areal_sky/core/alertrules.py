"""The rules of a spec's `alerts`, held against what is measured and reported."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from areal_sky.core.findings import Finding, Kind, Where
from areal_sky.core.telemetry import GpuWindow, Validity
from areal_sky.spec.cluster import AlertSpec
from areal_sky.units import format_duration

FRESH_S = 10.0  # an older window tells nothing of now
_OPS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip


def gpu_value(metric: str, w: GpuWindow) -> float | None:
    """The value of a `gpu_` metric of a rule (spec/alerts.py); None: the device does not tell."""
    match metric:
        case "gpu_lost":
            return float(w.validity is Validity.LOST)
        case "gpu_utilization_frac":
            return w.utilization_mean
        case "gpu_memory_used_frac":
            known = w.memory_used_gib is not None and w.memory_total_gib
            return (w.memory_used_gib or 0.0) / (w.memory_total_gib or 1.0) if known else None
        case "gpu_throttled":
            return None if w.throttle is None else float(any("thermal" in r for r in w.throttle))
        case _:
            return getattr(w, metric.removeprefix("gpu_"), None)


def words(rule: AlertSpec) -> str:
    """`gpu_temperature_celsius > 88 for 30s`: what names the rule's findings."""
    return rule.when + (f" for {format_duration(rule.for_s)}" if rule.for_s else "")


class RuleWatch:
    """Remembers since when each rule holds where. What is not known neither starts nor ends it, for FRESH_S."""

    def __init__(self, rules: Sequence[AlertSpec]):
        self._on_gpus = [r for r in rules if r.op is not None and r.metric.startswith("gpu_")]
        self._on_tasks = [r for r in rules if r.op is not None and not r.metric.startswith("gpu_")]
        self._on_kinds = {r.when: r for r in rules if r.op is None}
        self._holds: dict[tuple[str, Where], tuple[float, float, float]] = {}  # since, last seen, latest value
        self._held: dict[object, float] = {}  # findings of `_on_kinds` that must last, and since when they do

    def find(
        self, devices: Iterable[tuple[Where, GpuWindow]], tasks: Mapping[str, Mapping[str, float]], now_s: float
    ) -> list[Finding]:
        """What the rules on values find. `tasks`: the latest of each metric of every running task."""
        found: list[Finding] = []
        if self._on_gpus:
            for where, w in devices:
                if now_s - w.end_s <= FRESH_S:
                    for rule in self._on_gpus:
                        value = gpu_value(rule.metric, w)
                        # Nearly always there is nothing to it, and nothing to remember either.
                        if self._holds or (value is not None and _OPS[rule.op or ">"](value, rule.threshold)):
                            found += self._look(rule, where, value, w.end_s, now_s)
        for task_id, values in tasks.items() if self._on_tasks else ():
            for rule in self._on_tasks:
                found += self._look(rule, Where(task_id), values.get(rule.metric), now_s, now_s)
        self._holds = {k: v for k, v in self._holds.items() if now_s - v[1] <= FRESH_S}
        return found

    def allowed(self, findings: Iterable[Finding], now_s: float) -> Iterator[Finding]:
        """The findings that no rule wants ignored, nor wants to have lasted for longer."""
        seen: dict[object, float] = {}
        for f in findings:
            rule = self._on_kinds.get(f.kind.value)
            if rule is None:
                yield f
                continue
            if "ignore" in rule.then:
                continue
            seen[f.key] = self._held.get(f.key, now_s)
            if now_s - seen[f.key] >= rule.for_s:
                yield f
        self._held = seen

    def _look(
        self, rule: AlertSpec, where: Where, value: float | None, at_s: float, now_s: float
    ) -> Iterator[Finding]:
        name = words(rule)
        key = (name, where)
        before = self._holds.get(key)
        if value is not None:
            if not _OPS[rule.op or ">"](value, rule.threshold):
                self._holds.pop(key, None)
                return
            before = self._holds[key] = (at_s if before is None else before[0], now_s, value)
        if before is not None and at_s - before[0] >= rule.for_s:
            evidence = f"{rule.metric} is {before[2]:g}"
            yield Finding(Kind.RULE, where, before[0], name, evidence, name, {rule.metric: before[2]})


