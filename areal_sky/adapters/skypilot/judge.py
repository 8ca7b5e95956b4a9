"""What one replica is now, from SkyPilot's record of it, our own request for it, and what else is in flight. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from areal_sky.adapters.ports import LaunchRequest
from areal_sky.adapters.skypilot.requests import Request, SkyCluster
from areal_sky.core.model import Machine, MachineState
from areal_sky.errors import ArealSkyError, NoCapacity

# A launch whose request the server no longer knows (it was killed) may still be carried on by a surviving worker.
LOST_GRACE_S = 45.0


class Stage(StrEnum):
    WAITING = "WAITING"  # for the head's address, or for a free place
    SUBMITTING = "SUBMITTING"  # a thread talks to the server
    FLYING = "FLYING"  # the server has it
    LOST = "LOST"  # the server no longer knows the request
    DONE = "DONE"
    FAILED = "FAILED"


@dataclass(slots=True)
class Launching:
    """Our launch of one replica. `told`: the controller has got the request's id. `broken`: found useless since.

    `since_s`: when it got into its stage, `ended_s`: when the server was done with it; monotonic.
    """

    name: str
    request: LaunchRequest | None = None  # None: found again after a restart
    stage: Stage = Stage.WAITING
    request_id: str = ""
    told: bool = False
    error: ArealSkyError | None = None
    since_s: float = 0.0
    broken: str = ""
    ended_s: float = float("-inf")


@dataclass(slots=True)
class Ending:
    """The end of one replica, tried until SkyPilot lists it no more."""

    name: str
    stage: Stage = Stage.WAITING
    request_id: str = ""
    error: str = ""
    tries: int = 0
    retry_s: float = 0.0


def machine_of(
    name: str, record: SkyCluster | None, launch: Launching | None, ending: Ending | None,
    in_flight: Request | None, now_s: float,
) -> Machine | None:
    """The replica as the controller shall see it, None when it does not exist. `in_flight` is a launch of that name.

    `record` must be ours: clusters that others made under the name are left out by the caller.
    """  # fmt: skip
    nodes = record.nodes if record is not None else 0
    if ending is not None:
        return Machine(name, MachineState.STOPPING, nodes, error=ending.error, request_id=ending.request_id)
    if launch is not None and not launch.told:
        return None  # the controller first learns of it from launch()
    if in_flight is not None or (launch is not None and launch.stage is Stage.FLYING):
        request_id = in_flight.id if in_flight is not None else launch.request_id if launch is not None else ""
        note = record.note if record is not None else "waits for SkyPilot's API server to take it up"
        return Machine(name, MachineState.STARTING, 0, request_id=request_id, note=note)
    if launch is not None and launch.stage is Stage.FAILED:
        error = launch.error or ArealSkyError("the launch failed")
        return Machine(
            name, MachineState.FAILED, nodes, str(error), isinstance(error, NoCapacity), request_id=launch.request_id
        )
    if record is None:
        return _never_seen(launch, now_s)
    return _recorded(record, launch, now_s)


def _never_seen(launch: Launching | None, now_s: float) -> Machine | None:
    if launch is None or launch.stage is not Stage.LOST:
        return None
    if now_s - launch.since_s < LOST_GRACE_S:
        return Machine(launch.name, MachineState.STARTING, 0, request_id=launch.request_id, note=_LOST)
    return Machine(launch.name, MachineState.FAILED, 0, _LOST, request_id=launch.request_id)


_LOST = "SkyPilot's API server forgot the launch (was it restarted?)"


def _recorded(record: SkyCluster, launch: Launching | None, now_s: float) -> Machine:
    request_id = launch.request_id if launch is not None else ""

    def failed(why: str) -> Machine:
        return Machine(record.name, MachineState.FAILED, record.nodes, why, request_id=request_id)

    if launch is not None and launch.broken:
        return failed(launch.broken)
    match record.status:
        case "UP":
            return Machine(record.name, MachineState.UP, record.nodes, request_id=request_id)
        case "PENDING":
            return Machine(record.name, MachineState.STARTING, 0, request_id=request_id, note=record.note)
        case "INIT" if record.unhealthy:
            return failed(f"some of its nodes are gone or broken: {record.note or 'SkyPilot does not say more'}")
        case "INIT":
            # Nothing works on it any more, unless a worker of a killed server still does.
            if launch is not None and now_s - launch.since_s < LOST_GRACE_S:
                return Machine(record.name, MachineState.STARTING, 0, request_id=request_id, note=record.note)
            return failed("its launch was interrupted half-way")
        case "STOPPED":
            return failed("it was stopped")
        case _:
            return failed(f"SkyPilot is taking it down by itself ({record.status.lower()})")
