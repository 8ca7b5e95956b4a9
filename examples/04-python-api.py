"""The Python API on this machine: bring a cluster up, give it work, ask it why, grow it, end it.

    python examples/04-python-api.py
"""

from __future__ import annotations

from pathlib import Path

from areal_sky import Cluster, Task

SPEC = Path(__file__).with_name("04-python-api.yaml")


def count_to(n: int) -> int:
    """Runs in the cluster; what it returns is its exit code."""
    print(f"the numbers up to {n} add up to {sum(range(n + 1))}")
    return 0


def main() -> None:
    cluster = Cluster.up(SPEC)
    try:
        shell = cluster.submit(Task("echo rank $RANK has GPUs $CUDA_VISIBLE_DEVICES", kind="eval", bundles=2, gpus=1))
        python = cluster.submit(Task(lambda: count_to(1000), kind="eval"))
        for task in (shell, python):
            print(task.task_id, task.wait().lower(), "-", task.logs().strip())
        for _, sentence in shell.why():
            print("  ", sentence)

        decision = cluster.grow("rollout", by=1)
        print("grow:", decision.reason)
        cluster.wait_ready(timeout_s=120)
        print("replicas:", ", ".join(sorted(cluster.state().replicas)))
        print(f"bill: ${cluster.cost().usd:.4f}")
    finally:
        left = cluster.down(drain_s=0)
    print("left behind:", left or "nothing")


if __name__ == "__main__":
    main()
