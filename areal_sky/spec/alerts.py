"""`alerts`: what shall be watched and what shall be done about it. `notify`: who is told.

    alerts:
      - {when: gpu_temperature_celsius > 88, for: 30s, then: cordon}
      - "reward < 0.1 for 5m then notify, requeue"      # the same in one line
      - {when: stall, then: requeue}                    # what is found without being asked for, by its name
    notify: {webhook: $ALERT_WEBHOOK, command: ./page.sh}
"""

from __future__ import annotations

import math
import re
from typing import Literal, cast

from areal_sky.errors import InvalidInput
from areal_sky.spec.cluster import AlertSpec, NotifySpec
from areal_sky.spec.fields import Fields, did_you_mean, show
from areal_sky.spec.marks import ListNode, Node, ScalarNode
from areal_sky.units import parse_duration_s

DAY_S = 86400.0
Op = Literal[">", ">=", "<", "<=", "==", "!="]

# What can be done. `notify` is done in any case, except where `ignore` stands.
ACTIONS = ("notify", "cordon", "drain", "requeue", "shrink", "sample_fast", "sample_slow", "ignore")

# What is found without being asked for (core/findings.py); a rule by that name says what is done then.
ANOMALIES = (
    "stall", "throughput_drop", "straggler", "memory_leak", "heat", "ecc", "xid", "lost_gpu", "not_a_number",
)  # fmt: skip

# What the node agents measure (fields of GpuWindow). Names outside `gpu_` are the user's own, from tasks' metrics.
GPU_METRICS = (
    "gpu_utilization_frac",
    "gpu_memory_used_gib",
    "gpu_memory_used_frac",
    "gpu_temperature_celsius",
    "gpu_power_watts",
    "gpu_lost",
    "gpu_throttled",
    "gpu_sm_clock_mhz",
    "gpu_memory_clock_mhz",
    "gpu_ecc_uncorrected",
    "gpu_ecc_corrected",
    "gpu_pcie_rx_mib_s",
    "gpu_pcie_tx_mib_s",
    "gpu_nvlink_mib_s",
    "gpu_xid",
)

_CONDITION = re.compile(r"\s*([A-Za-z_][\w./-]*)\s*(>=|<=|==|!=|>|<)\s*(-?\d+(?:\.\d+)?(?:e-?\d+)?)\s*", re.ASCII)
_LINE = re.compile(r"(?P<when>.+?)(?:\s+for\s+(?P<for>\S+))?(?:\s+then\s+(?P<then>.+))?", re.DOTALL)
_WEBHOOK = re.compile(r"https?://\S+|\$[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_EXPECTED = "METRIC > NUMBER, such as gpu_temperature_celsius > 88 (or >=, <, <=, ==, !=)"


def read_alerts(top: Fields) -> tuple[AlertSpec, ...]:
    alerts: list[AlertSpec] = []
    for path, item in top.items("alerts", "a list of alerts"):
        if isinstance(item, ScalarNode) and isinstance(item.value, str):
            alert = _from_line(top, path, item)
        else:
            f = Fields(item, path, top.notes)
            f.hint({"condition": "when", "metric": "when", "duration": "for", "action": "then", "do": "then"})
            when = f.required_text("when", "a comparison such as gpu_temperature_celsius > 88")
            for_s = f.duration_s("for", 0, DAY_S) or 0.0
            then = _actions(f)
            f.finish()
            alert = None if when is None else _alert(f, f.map.entries["when"], f.path("when"), when, for_s, then)
        if alert is not None:
            alerts.append(alert)
    return tuple(alerts)


def read_notify(top: Fields) -> NotifySpec:
    f = top.block("notify")
    f.hint({"url": "webhook", "slack": "webhook", "hook": "webhook", "exec": "command", "run": "command"})
    webhook = f.text("webhook", "a URL, or $NAME of the head's environment", secret=True)
    if webhook is not None and not _WEBHOOK.fullmatch(webhook):
        f.wrong(
            f.map.entries["webhook"],
            "notify.webhook is no URL, expected https://... or, so that it stands in no file, $NAME of the head's "
            "environment (`secrets`)",
        )
    command = f.text("command", "a shell command; it gets the alert as JSON on its stdin")
    f.finish()
    return NotifySpec(webhook=webhook, command=command)


def _from_line(top: Fields, path: str, node: ScalarNode) -> AlertSpec | None:
    """`gpu_temperature_celsius > 88 for 30s then cordon`."""
    match = _LINE.fullmatch(str(node.value).strip())
    if match is None:
        top.wrong(node, f"{path} is {show(node)}, expected {_EXPECTED}, then perhaps `for 30s` and `then cordon`")
        return None
    for_s = 0.0
    if match["for"]:
        try:
            for_s = parse_duration_s(match["for"])
        except InvalidInput as e:
            top.wrong(node, f"{path}: {e}")
        if for_s > DAY_S:
            top.wrong(node, f"{path} waits for {match['for']}, expected at most a day")
    then = tuple(x for x in re.split(r"[\s,]+", match["then"] or "notify") if x)
    for name in then:
        if name not in ACTIONS:
            top.wrong(
                node, f"{path}: `{name[:40]}` cannot be done, expected one of: {', '.join(ACTIONS)}"
                f"{did_you_mean(name, ACTIONS)}"
            )  # fmt: skip
    return _alert(top, node, path, match["when"], for_s, then)


def _alert(
    f: Fields, at: Node, path: str, when: str, for_s: float, then: tuple[str, ...]
) -> AlertSpec | None:  # fmt: skip
    if when.strip() in ANOMALIES:
        return AlertSpec(when=when.strip(), metric="", op=None, threshold=0.0, for_s=for_s, then=then)
    match = _CONDITION.fullmatch(when)
    if match is None or not math.isfinite(float(match[3])):
        near = did_you_mean(when.strip(), ANOMALIES)
        f.wrong(at, f"{path} is {show(at)}, expected {_EXPECTED}; or one of: {', '.join(ANOMALIES)}{near}")
        return None
    metric = match[1]
    if metric.startswith("gpu_") and metric not in GPU_METRICS:
        f.wrong(
            at,
            f"{path}: `{metric[:60]}` is not measured, expected one of: "
            f"{', '.join(GPU_METRICS)}{did_you_mean(metric, GPU_METRICS)}",
        )
    return AlertSpec(
        when=when.strip(), metric=metric, op=cast(Op, match[2]), threshold=float(match[3]), for_s=for_s, then=then
    )


def _actions(f: Fields) -> tuple[str, ...]:
    """One action, or a list of them; `notify` where nothing is said."""
    node = f.map.entries.get("then")
    if not isinstance(node, ListNode):
        one = f.choice("then", ACTIONS)
        return (one or "notify",)
    found: list[str] = []
    for path, item in f.items("then", "one of: " + ", ".join(ACTIONS)):
        name = item.value if isinstance(item, ScalarNode) else None
        if name in ACTIONS:
            found.append(str(name))
        else:
            f.wrong(item, f"{path} is {show(item)}, expected one of: {', '.join(ACTIONS)}")
    return tuple(found) or ("notify",)
