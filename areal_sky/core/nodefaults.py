"""Which nodes look broken: several different tasks failed there soon after their start.

One task that fails everywhere says nothing of a node, so failures count once per command. A run that does well clears
its nodes. Nodes are not given up for good: after AVOID_S a node may show that it works again.
"""

from __future__ import annotations

from collections.abc import Collection

QUICK_S = 60.0  # a run that fails within this has hardly begun
SEVERAL = 3  # different commands
WINDOW_S = 900.0
AVOID_S = 1800.0


class NodeFaults:
    """Quick failures per node, of the last WINDOW_S seconds. What is avoided is kept by whoever asks."""

    def __init__(self) -> None:
        self._failed: dict[str, dict[str, float]] = {}

    def failed(self, node_id: str, command: str, ran_s: float, now_s: float) -> int:
        """Notes a failure; returns how many different commands have failed quickly on the node of late."""
        if ran_s > QUICK_S:
            return 0
        seen = self._failed.setdefault(node_id, {})
        seen[command] = now_s
        for old in [c for c, t_s in seen.items() if not now_s - WINDOW_S <= t_s <= now_s]:
            del seen[old]
        return len(seen)

    def did_well(self, node_ids: Collection[str]) -> None:
        """A task has succeeded on these nodes."""
        for node_id in node_ids:
            self._failed.pop(node_id, None)

    def forget(self, node_id: str) -> None:
        """The node is gone, or is avoided from now on and starts anew after."""
        self._failed.pop(node_id, None)


def may_avoid(avoided: int, nodes: int) -> bool:
    """Whether one node more of a group may be avoided: never more than half, for then the tasks are to blame."""
    return (avoided + 1) * 2 <= nodes
