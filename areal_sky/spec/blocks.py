"""The blocks of numbers: scaling, spot, budget, telemetry."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from areal_sky.spec.cluster import (
    BudgetSpec,
    ScalingSpec,
    SpotSpec,
    TelemetrySpec,
)
from areal_sky.spec.fields import Fields, moment_s, show
from areal_sky.units import format_duration

DAY_S = 86400.0
_PARTITION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", re.ASCII)
_POLICY = re.compile(r"[A-Za-z_][\w-]*|[A-Za-z_][\w.]*:[A-Za-z_]\w*", re.ASCII)
_POLICY_GRAMMAR = "the name of a preset or built-in policy, or module:function"


def read_scaling(top: Fields) -> ScalingSpec:
    f = top.block("scaling")
    f.hint({"strategy": "policy", "utilization": "target_utilization", "cooldown_s": "cooldown", "idle_s": "idle"})
    default = ScalingSpec()
    policy = read_policy(f, "policy")
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


def read_spot(top: Fields, places: Iterable[str | None] = ()) -> SpotSpec:
    """`places` are the infra strings of the groups, against which a Slurm partition is held."""
    f = top.block("spot")
    f.hint({
        "max_price_frac": "max_spot_price_frac", "max_price": "max_spot_price_frac", "strategy": "policy",
        "give_up": "patience", "timeout": "patience", "wait": "patience", "retry": "hold", "cooldown": "hold",
        "partition": "slurm_partition",
    })  # fmt: skip
    default = SpotSpec()
    policy = read_policy(f, "policy")
    frac = f.number(
        "max_spot_price_frac", "a share of the on-demand price above 0 and at most 1, such as 0.6", lambda v: 0 < v <= 1
    )
    patience = f.duration_s("patience", 0, DAY_S)
    # Below a minute a group would change its market faster than machines come up.
    hold = f.duration_s("hold", 60, 7 * DAY_S)
    partition = _slurm_partition(f, [p.split("/") for p in places if p and p.split("/")[0] == "slurm"])
    f.finish()
    return SpotSpec(
        policy=policy or default.policy,
        max_spot_price_frac=frac,
        patience_s=default.patience_s if patience is None else patience,
        hold_s=default.hold_s if hold is None else hold,
        slurm_partition=partition,
    )


def _slurm_partition(f: Fields, clusters: Sequence[Sequence[str]]) -> str | None:
    expected = "the name of a Slurm partition whose jobs give way, such as preempt"
    name = f.text("slurm_partition", expected)
    if name is None:
        return None
    if not _PARTITION.fullmatch(name):
        told = f", expected {expected}"
    elif not clusters:
        told = " and nothing here is on Slurm, expected infra: slurm/CLUSTER/PARTITION, or no `slurm_partition`"
    elif any(len(c) < 2 for c in clusters):
        told = " on infra `slurm`, expected the cluster there too: slurm/CLUSTER or slurm/CLUSTER/PARTITION"
    elif any(list(c[2:]) == [name] for c in clusters):
        told = ", the partition of the infra itself, expected another: replicas that are not on spot go to that one"
    else:
        return name
    node = f.map.entries["slurm_partition"]
    f.wrong(node, f"{f.path('slurm_partition')} is {show(node)}{told}")
    return None


def read_budget(top: Fields, now_s: float | None) -> BudgetSpec:
    f = top.block("budget")
    f.hint({
        "hourly": "max_hourly_usd", "max_hourly": "max_hourly_usd", "total": "max_total_usd",
        "max_total": "max_total_usd", "max_hourly_cost": "max_hourly_usd", "max_cost": "max_total_usd",
        "until": "deadline",
    })  # fmt: skip
    hourly, total, deadline = f.usd("max_hourly_usd"), f.usd("max_total_usd"), moment_s(f, "deadline", now_s)
    f.finish()
    return BudgetSpec(max_hourly_usd=hourly, max_total_usd=total, deadline_s=deadline)


def read_telemetry(top: Fields) -> TelemetrySpec:
    f = top.block("telemetry")
    f.hint({"interval": "normal_interval", "critical": "critical_interval", "normal": "normal_interval"})
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


def read_policy(f: Fields, key: str) -> str | None:
    """The name of a preset or built-in policy, or `module:function`."""
    text = f.text(key, _POLICY_GRAMMAR)
    if text is None or _POLICY.fullmatch(text):
        return text
    node = f.map.entries[key]
    f.wrong(node, f"{f.path(key)} is {show(node)}, expected {_POLICY_GRAMMAR}")
    return None
