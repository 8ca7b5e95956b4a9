"""The life of a replica as a table: one row per legal move, with what causes it.

    QUEUED -> REQUESTED -> PROVISIONED -> READY -> DRAINING -> TERMINATING -> TERMINATED
                  |              |          |          |            ^
                  `--> LAUNCH_FAILED        `--> LOST -`------------'
"""

from __future__ import annotations

from dataclasses import replace

from areal_sky.core.model import Replica, ReplicaState
from areal_sky.errors import StateError

S = ReplicaState

MOVES: dict[tuple[ReplicaState, ReplicaState], str] = {
    (S.QUEUED, S.REQUESTED): "the cloud accepted the launch, or we found it there after a crash",
    (S.QUEUED, S.LAUNCH_FAILED): "the cloud refused at once",
    (S.QUEUED, S.TERMINATING): "no longer wanted; it may have been launched, so ask the cloud to end it",
    (S.REQUESTED, S.PROVISIONED): "machines exist",
    (S.REQUESTED, S.LAUNCH_FAILED): "the launch ended in an error, or the machines vanished before they were up",
    (S.REQUESTED, S.TERMINATING): "no longer wanted",
    (S.PROVISIONED, S.READY): "every node is a live Ray node",
    (S.PROVISIONED, S.LAUNCH_FAILED): "machines came up but never joined, or vanished before they did",
    (S.PROVISIONED, S.TERMINATING): "no longer wanted",
    (S.READY, S.DRAINING): "chosen to go: takes no new work",
    (S.READY, S.LOST): "a node died or the cloud took it back",
    (S.READY, S.TERMINATING): "must go now, without draining",
    (S.DRAINING, S.TERMINATING): "nothing runs there any more, or the deadline has passed",
    (S.DRAINING, S.LOST): "it died while it drained",
    (S.LOST, S.TERMINATING): "whatever is left of it must end before it can be replaced",
    (S.LAUNCH_FAILED, S.TERMINATING): "whatever came up must end before another try",
    (S.TERMINATING, S.TERMINATED): "the cloud confirms that nothing is left",
}

# States in which a replica counts towards what its group wants.
SERVING = frozenset({S.QUEUED, S.REQUESTED, S.PROVISIONED, S.READY})
STARTING = frozenset({S.QUEUED, S.REQUESTED, S.PROVISIONED})


def move(replica: Replica, to: ReplicaState, now_s: float, reason: str = "") -> Replica:
    """The replica in its next state. Raises StateError for a move that the table does not have."""
    if (replica.state, to) not in MOVES:
        raise StateError(f"replica {replica.name}: illegal move {replica.state} -> {to}: {reason}")
    return replace(replica, state=to, since_s=now_s, reason=reason or replica.reason, note="")
