"""Random histories: a virtual cluster lives through any sequence of events, and every invariant holds at every step.

A history is a list of steps, each a word and a number that picks the victim, so that any part of one is a history
too: what fails can be shrunk, by Hypothesis or by `shrunk`. Processes die between any two records and any two calls;
calls get lost, answers get lost, both come twice; parts lose sight of each other. At the end all heals: every task
that was accepted must end, everything that was taken must be given back, and a cluster that is told to end must.
"""

from __future__ import annotations

import random
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_sky.adapters.fakewire import Fault
from areal_sky.core.events import DownRequested
from areal_sky.core.model import Bundle
from areal_sky.core.taskmodel import TaskSpec
from areal_sky.errors import ArealSkyError
from areal_sky.run.simulation.historyworld import MOST, WIRES, World
from areal_sky.run.simulation.invariants import Invariants, Violation
from areal_sky.run.tasks import TaskService

# word -> how often it comes in random histories, in parts
WORDS = {
    "wait": 10, "submit": 20, "end": 10, "fail": 3, "lose": 2, "cancel": 2, "checkpoint": 2, "phase": 3,
    "reclaim": 3, "node_dies": 3, "launch_fails": 3, "wish": 3, "surprise": 2, "evict": 2,
    "fault": 16, "half": 3, "head_dies": 3, "controller_dies": 3, "head_lost": 1,
    "cloud_silent": 2, "head_cut": 2, "ray_cut": 2, "no_capacity": 2, "slow_exit": 1, "slow_start": 1,
}  # fmt: skip
LENGTH = 40
BEATS_S = (0.2, 0.5, 1.0, 5.0)
PATIENCE_BEATS = 300  # of 5 s: how long the healed cluster may take to come to rest


@dataclass(frozen=True, slots=True)
class Step:
    word: str
    n: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """`events`: records written by both processes, and faults that struck. `violation` is empty when all held."""

    events: int
    faults: int
    violation: str = ""
    at_step: int | None = None


def random_history(seed: int, length: int = LENGTH) -> tuple[Step, ...]:
    """The same for the same seed."""
    dice = random.Random(seed)
    words = dice.choices(tuple(WORDS), tuple(WORDS.values()), k=length)
    return tuple(Step(word, dice.randrange(10_000)) for word in words)


def live(history: Sequence[Step]) -> Outcome:
    """Lives through the history. Nothing is raised: what went wrong is in the outcome."""
    with tempfile.TemporaryDirectory(prefix="history-") as folder:
        world = World(Path(folder))
        checks = Invariants(world)
        at: int | None = None
        violation = ""
        try:
            for at, step in enumerate(history):
                _take(world, step, at)
                world.beat(BEATS_S[step.n % len(BEATS_S)])
                checks.hold()
            at = None
            _rest(world, checks)
        except Violation as e:
            violation = str(e)
        except Exception:
            violation = f"a process raised what its loop does not expect:\n{traceback.format_exc()}"
        finally:
            events = checks.events()
            world.close()
        return Outcome(events, world.faults.struck, violation, at if violation else None)


def shrunk(history: Sequence[Step], budget: int = 400) -> tuple[Step, ...]:
    """A part of the failing history that still fails, by leaving out ever smaller pieces; at most `budget` tries."""
    kept = tuple(history)
    piece = max(1, len(kept) // 2)
    while budget > 0:
        start = 0
        while start < len(kept) and budget > 0:
            tried = kept[:start] + kept[start + piece :]
            budget -= 1
            if live(tried).violation:
                kept = tried
            else:
                start += piece
        if piece == 1:
            break
        piece //= 2
    return kept


# ---------------------------------------------------------------- steps


def _take(world: World, step: Step, at: int) -> None:
    """What the step says, where there is something to do it to."""
    n, cloud, ray = step.n, world.cloud, world.ray
    workers = sorted(r for r in cloud.existing if r != "c-head-0")
    running = ray.running()
    match step.word:
        case "wait":
            for _ in range(n % 7):
                world.beat(BEATS_S[n % len(BEATS_S)])
        case "submit":
            world.submit(_spec(n, f"k{at}"), f"k{at}")
        case "end" | "fail" | "lose" if running:
            code = {"end": 0, "fail": 1 + n % 2, "lose": None}[step.word]
            gang, rank = running[n % len(running)]
            for g, r in [(g, r) for g, r in running if g == gang and (step.word == "end" or r == rank)]:
                world.finish(g, r, code)
        case "cancel" | "checkpoint" | "phase" if world.answered:
            task_id = sorted(world.answered.values())[n % len(world.answered)]
            _tell(world, step.word, task_id, n)
        case "reclaim" if workers:
            world.reclaim(workers[n % len(workers)])
        case "node_dies" if ray.live:
            ray.kill_node(sorted(ray.live)[n % len(ray.live)])
        case "launch_fails" if workers:
            cloud.failing.add(workers[n % len(workers)])
        case "evict" if workers:
            _asked(world, lambda s: s.evict_replica(workers[n % len(workers)], "reclaim notice"))
        case "wish" | "surprise":
            world.wish(n % (MOST + 1), step.word == "surprise")
        case "fault":
            wire = tuple(WIRES)[n % len(WIRES)]
            possible = sorted({f for fs in WIRES[wire].values() for f in fs})
            world.faults.arm(wire, Fault(possible[n // 7 % len(possible)]), 1 + n // 77 % 12)
        case "half":
            ray.crash_after = 1 + n % 12
        case "head_dies":
            world.kill_head(n % 4)
        case "controller_dies":
            world.kill_controller()
        case "head_lost" if n % 3 == 0:
            world.reclaim("c-head-0")
        case "cloud_silent":
            cloud.silent = "" if cloud.silent else "no API server"
        case "no_capacity":
            cloud.refuse = "" if cloud.refuse else "none to be had"
        case "ray_cut":
            ray.unreachable = "" if ray.unreachable else "no Ray"
        case "head_cut":
            world.head_cut = not world.head_cut
        case "slow_exit":
            ray.slow_exit = not ray.slow_exit
        case "slow_start":
            ray.slow_start = not ray.slow_start
        case _:
            pass


def _spec(n: int, key: str) -> TaskSpec:
    kind = ("train", "rollout", "eval", "reward")[n % 4]
    gpus = (0.5, 1.0, 2.0, 4.0)[n // 4 % 4]
    bundles = 1 + n // 16 % 3
    elastic = kind == "rollout" and bundles > 1 and n % 3 == 0
    return TaskSpec(
        kind=kind, command="x", bundles=bundles, bundle=Bundle(gpus, 1), min_bundles=1 if elastic else None,
        priority=float(n // 48 % 10), max_retries=n // 480 % 3, backoff_s=float(n % 2), submit_key=key,
        group="trainer" if gpus * bundles <= 8 and n % 11 == 0 else None,
        timeout_s=60.0 if n % 13 == 0 else None, deadline_s=1000.0 + n % 300 if n % 5 == 0 else None,
        estimate_s=float(n % 200) if n % 6 == 0 else None,
    )  # fmt: skip


def _tell(world: World, word: str, task_id: str, n: int) -> None:
    match word:
        case "cancel":
            _asked(world, lambda s: s.cancel(task_id))
        case "checkpoint":
            _asked(world, lambda s: s.checkpointed(task_id))
        case _:
            _asked(world, lambda s: s.enter_phase(task_id, "low" if n % 2 else "busy", bool(n % 2)))


def _asked(world: World, call: Callable[[TaskService], Any]) -> None:
    """Once: whoever has no answer does not ask again."""
    with suppress(ArealSkyError):
        world.ask(call)


# ---------------------------------------------------------------- the end


def _rest(world: World, checks: Invariants) -> None:
    """All heals and all work gets done; then the cluster is told to end."""
    world.heal()
    world.wish(MOST, False)
    for _ in range(PATIENCE_BEATS):
        for gang, rank in world.ray.running():
            world.finish(gang, rank, 0)
        world.beat(5.0)
        checks.hold()
        if checks.at_rest():
            break
    checks.rested()
    world.store.append(world.clock.now(), DownRequested("the end", 5.0))
    for _ in range(PATIENCE_BEATS):
        world.beat(2.0)
        checks.hold()
        if world.controller.done:
            break
    checks.ended()
