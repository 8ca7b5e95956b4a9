"""What the kernel's files say of memory, in the forms that machines, containers and Slurm jobs have them."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_sky.adapters.hostmemory import GIB, memory_use, oom_kills

MEMINFO = f"MemTotal: {100 * 2**20} kB\nMemFree: 9 kB\nMemAvailable: {60 * 2**20} kB\nHugePages_Total: 0\n"
MACHINE = {"proc/meminfo": MEMINFO}


def v2(folder: str, most: object, used_gib: float, cache_gib: float = 0.0) -> dict[str, str]:
    folder = f"sys/fs/cgroup{folder}"
    return {
        f"{folder}/memory.max": f"{most}\n",
        f"{folder}/memory.current": f"{int(used_gib * GIB)}\n",
        f"{folder}/memory.stat": f"anon 1\ninactive_file {int(cache_gib * GIB)}\n",
    }


@pytest.mark.parametrize(
    ("files", "use"),
    [
        ({}, None),
        (MACHINE, (40, 100)),
        # A pod's own group is the root of what it sees.
        (MACHINE | {"proc/self/cgroup": "0::/\n"} | v2("", 32 * GIB, 20, cache_gib=5), (15, 32)),
        # A Slurm job's limit is above the step that runs in it.
        (
            MACHINE | {"proc/self/cgroup": "0::/slurm/job_1/step_0\n"}
            | v2("/slurm/job_1", 50 * GIB, 45) | v2("/slurm/job_1/step_0", "max", 45),
            (45, 50),
        ),
        # A limit that other groups leave no room for: the machine itself is nearer to its end.
        (MACHINE | {"proc/self/cgroup": "0::/a\n"} | v2("/a", 90 * GIB, 5), (40, 100)),
        (
            MACHINE | {
                "proc/self/cgroup": "3:cpu:/x\n4:memory:/y\n0::/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "sys/fs/cgroup/memory/y/memory.limit_in_bytes": f"{8 * GIB}\n",
                "sys/fs/cgroup/memory/y/memory.usage_in_bytes": f"{7 * GIB}\n",
                "sys/fs/cgroup/memory/y/memory.stat": f"cache 1\ntotal_inactive_file {GIB}\n",
            },
            (6, 8),
        ),
    ],
)  # fmt: skip
def test_what_is_nearest_to_its_end_counts(tmp_path: Path, files: dict[str, str], use: tuple[float, float]) -> None:
    put(tmp_path, files)
    assert memory_use(tmp_path) == use


def test_this_machine_says_something() -> None:
    use = memory_use()
    assert use is not None and 0 < use.used_gib < use.total_gib


@pytest.mark.parametrize(
    ("files", "count"),
    [
        ({}, 0),
        ({"proc/vmstat": "nr_free 5\noom_kill 7\n"}, 7),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.events": "low 0\noom 9\noom_kill 2\n"}, 2),
        (
            {
                "proc/self/cgroup": "12:cpu:/x\n4:memory:/y\n",
                "sys/fs/cgroup/memory/y/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n",
            },
            5,
        ),
        ({"proc/self/cgroup": "nonsense\n", "proc/vmstat": "oom_kill many\n"}, 0),
    ],
)
def test_the_kernels_count_of_kills_is_read_wherever_it_is(tmp_path: Path, files: dict[str, str], count: int) -> None:
    put(tmp_path, files)
    assert oom_kills(tmp_path) == count


def put(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
