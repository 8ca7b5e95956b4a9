"""GPUs that nobody will be able to use, for want of the CPUs that tasks usually bring to a GPU.

On the Alibaba gpu-v2023 trace this, not the size of holes, is what leaves GPUs idle on a full cluster: pods that want
few CPUs and pods that want many both go where GPUs are fewest, and leave machines with GPUs but no CPUs. A gang goes
where it makes `stranded` grow least. It is fragmentation gradient descent (Weng et al., USENIX ATC'23) with one task
type instead of all, so it costs a subtraction instead of a table; `python -m benchmarks placement` compares both.
"""

from __future__ import annotations


class UsualAsk:
    """CPUs that come with a GPU: the mean over all tasks with GPUs so far, weighted with their GPUs."""

    __slots__ = ("cpus", "gpus")

    def __init__(self) -> None:
        self.cpus = 0
        self.gpus = 0

    def seen(self, gpus: int, cpus: int) -> None:
        """A task has been submitted; both in the same units."""
        if gpus > 0:
            self.gpus += gpus
            self.cpus += cpus

    def stranded(self, gpus: int, cpus: int) -> int:
        """Of so many free GPUs those for which the free CPUs do not suffice, as tasks usually are."""
        if not self.cpus:
            return 0
        return max(0, gpus - cpus * self.gpus // self.cpus)

    def grows_by(self, gpus: int, cpus: int, wanted_gpus: int, wanted_cpus: int) -> int:
        """How much more is stranded on a node with so much free once a bundle has been placed there."""
        if not self.cpus:
            return 0
        return self.stranded(gpus - wanted_gpus, cpus - wanted_cpus) - self.stranded(gpus, cpus)
