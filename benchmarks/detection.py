"""How soon and how surely faults are found: scripted faults in a gang's telemetry, and hours in which nothing is wrong.

Time is made up, so this takes none of its own, but for the lost GPU, which is timed through a real agent, HTTP and the
head (benchmarks/lost_gpu.py; read every 100 ms as where a task trains; `lost_gpu_1hz` as elsewhere). Each kind of fault
strikes SEEDS gangs that differ in the length of their steps and in every random draw. `recall`: faults that were found,
for what they are and where they are, within LATEST_S. `precision`: alerts that told of the fault or of what follows
from it (`CONSEQUENCES`), beside all that were raised in all trials and in the healthy hours. `*_s` are the worst of all
gangs, from the fault to the alert; a slow rank shows at the end of a step at the earliest, so `straggler_s` is of gangs
with steps of at most 8 s.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any, Literal, NamedTuple

from areal_sky.core.findings import Kind, Where
from benchmarks import lost_gpu
from benchmarks.scripted_load import REPLICA, TASK, Gang, Load, run

SEEDS = 5
HEALTHY_HOURS = 5
STEP_S = (1.0, 2.0, 4.0, 8.0, 20.0)
LEARN_S = 700  # of healthy work before the fault
LATEST_S = 600
LOST_TIMES = 4


class Fault(NamedTuple):
    """What happens, and what must be found where: at a GPU of the node, at the machine itself, or at the task."""

    strike: Callable[[Load], None]
    kind: Kind
    place: int | Literal["machine", "task"] = "task"


def _set(**values: Any) -> Callable[[Load], None]:
    def strike(load: Load) -> None:
        for name, value in values.items():
            setattr(load, name, copy(value))

    return strike


def _twice_as_long(load: Load) -> None:
    load.step_s *= 2


FAULTS: dict[str, Fault] = {
    "stall_idle": Fault(_set(stuck=True), Kind.STALL),
    "stall_spinning": Fault(_set(stuck=True, spinning=True), Kind.STALL),
    "throughput_drop": Fault(_twice_as_long, Kind.THROUGHPUT_DROP),
    "straggler": Fault(_set(slow={3: 1.8}), Kind.STRAGGLER, 3),
    "memory_leak": Fault(_set(leak_gib_s={5: 0.02}), Kind.MEMORY_LEAK),
    "host_memory_leak": Fault(_set(host_leak_gib_s=0.4), Kind.MEMORY_LEAK, "machine"),
    "throttled": Fault(_set(throttle={2: "hw_thermal"}), Kind.HEAT, 2),
    "hot": Fault(_set(hot={6: 17.0}), Kind.HEAT, 6),
    "ecc": Fault(_set(ecc={1: 2}), Kind.ECC, 1),
    "xid": Fault(_set(xid={4: 94}), Kind.XID, 4),
    "lost_gpu": Fault(_set(lost={7}), Kind.LOST_GPU, 7),
    "reward_nan": Fault(_set(nan=True), Kind.NOT_A_NUMBER),
}
# A slow rank slows its gang, and a GPU that is slowed down for its heat makes a slow rank.
CONSEQUENCES: dict[Kind, frozenset[Kind]] = {
    Kind.STRAGGLER: frozenset({Kind.THROUGHPUT_DROP}),
    Kind.HEAT: frozenset({Kind.STRAGGLER, Kind.THROUGHPUT_DROP}),
}


class Trial(NamedTuple):
    """Seconds from the fault until it was found (None: it was not), alerts that were right, and the others in words."""

    found_s: float | None
    right: int
    wrong: list[str]


def measure() -> dict[str, Any]:
    trials = {(name, seed): trial(name, seed) for name in FAULTS for seed in range(SEEDS)}
    healthy = [words for hour in range(HEALTHY_HOURS) for words in false_alarms(hour)]
    right = sum(t.right for t in trials.values())
    wrong = sum(len(t.wrong) for t in trials.values()) + len(healthy)
    worst = {
        name: max((t.found_s for (n, _), t in trials.items() if n == name and t.found_s is not None), default=None)
        for name in FAULTS
    }
    worst["lost_gpu"] = max(lost_gpu.seconds(0.1, times=LOST_TIMES))
    worst["lost_gpu_1hz"] = max(lost_gpu.seconds(1.0, times=LOST_TIMES))
    stragglers = [trials["straggler", seed].found_s for seed, step_s in enumerate(STEP_S) if step_s <= 8]
    return {
        "precision": right / max(1, right + wrong),
        "recall": sum(t.found_s is not None for t in trials.values()) / len(trials),
        "false_alarms_per_healthy_hour": len(healthy) / HEALTHY_HOURS,
        "stall_s": worst["stall_idle"],
        "lost_gpu_s": worst["lost_gpu"],
        "straggler_s": max((s for s in stragglers if s is not None), default=None),
        "worst_s": worst,
    }


def trial(name: str, seed: int) -> Trial:
    """One fault in one gang."""
    fault = FAULTS[name]
    gang = Gang(seed, Load(step_s=STEP_S[seed % len(STEP_S)]))
    found_s: float | None = None
    right, wrong = 0, list[str]()
    for at_s, since_s, change in run(gang, LEARN_S + LATEST_S, {LEARN_S: fault.strike}):
        if change.moved == "resolved":
            continue
        alert = change.alert
        here = _is_at(alert.where, fault.place)
        if at_s > LEARN_S and here and alert.kind == fault.kind:
            found_s = since_s if found_s is None else found_s
            right += 1
        elif at_s > LEARN_S and alert.kind in CONSEQUENCES.get(fault.kind, ()):
            right += 1
        else:
            wrong.append(str(alert))
    return Trial(found_s, right, wrong)


def false_alarms(seed: int, seconds: int = 3600) -> list[str]:
    """What is raised in an hour in which nothing is wrong."""
    gang = Gang(1000 + seed, Load(step_s=STEP_S[seed % len(STEP_S)]))
    return [str(change.alert) for _, _, change in run(gang, seconds, {}) if change.moved == "raised"]


def _is_at(where: Where, place: int | str) -> bool:
    if place == "task":
        return where == Where(TASK)
    return where == Where("", None, REPLICA) if place == "machine" else where.device == place
