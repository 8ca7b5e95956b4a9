"""A small Ray program that takes its GPUs the way AReaL's RayScheduler does: placement groups of its own.

Shared: one group of many bundles of one GPU, a trainer rank in each. Separate: a group for each rollout instance.
Arguments: a folder, then steps; before each it waits for `go1`, `go2`, ... in the folder, and says when it is made.
`shared:8`, `separate:2x4` (two instances of four GPUs), `actor:1` (without a group), `task:1` (a plain Ray task).
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


@ray.remote
class Rank:
    def ping(self) -> str:
        return ray.get_runtime_context().get_node_id()


@ray.remote
def work(until: str) -> None:
    while not Path(until).exists():
        time.sleep(0.05)


kept: list[object] = []


def group(bundles: list[dict[str, float]]) -> object:
    made = placement_group(bundles, strategy="PACK")
    ray.get(made.ready(), timeout=30)  # as long as AReaL waits
    kept.append(made)
    return made


def rank(gpus: float, made: object | None = None, index: int = 0) -> None:
    where = {} if made is None else {"scheduling_strategy": PlacementGroupSchedulingStrategy(made, index)}
    actor = Rank.options(num_gpus=gpus, num_cpus=0, **where).remote()
    ray.get(actor.ping.remote(), timeout=60)
    kept.append(actor)


def step(text: str, folder: Path) -> None:
    kind, _, amount = text.partition(":")
    if kind == "shared":
        made = group([{"GPU": 1.0}] * int(amount))
        rank(0.9, made)  # AReaL leaves a tenth for workers that share the GPU
    elif kind == "separate":
        count, _, gpus = amount.partition("x")
        for _ in range(int(count)):
            rank(float(gpus), group([{"GPU": float(gpus)}]))
    elif kind == "actor":
        rank(float(amount))
    elif kind == "task":
        kept.append(work.options(num_gpus=float(amount), num_cpus=0).remote(str(folder / "end-task")))


def main() -> None:
    folder = Path(sys.argv[1])
    ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False, logging_level="ERROR")
    print("connected", flush=True)
    for n, text in enumerate(sys.argv[2:], 1):
        while not (folder / f"go{n}").exists():
            time.sleep(0.05)
        step(text, folder)
        print(f"made {text}", flush=True)
    while True:  # trains until it is ended
        time.sleep(1)


if __name__ == "__main__":
    main()
