"""SkyCloud on a stand-in for the API server: nothing twice, nothing lost, nothing of others touched, no waiting."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from areal_sky.adapters.ports import LaunchRequest
from areal_sky.adapters.skypilot import cloud as cloud_module
from areal_sky.adapters.skypilot import judge
from areal_sky.adapters.skypilot.cloud import SkyCloud
from areal_sky.adapters.skypilot.filled import filled
from areal_sky.adapters.skypilot.requests import DOWN, SkyCluster
from areal_sky.core.model import GroupPlan, Machine, MachineState, NodeShape, Offer
from areal_sky.errors import AlreadyExists, ArealSkyError, NoCapacity, NotFound, Unreachable
from tests.adapters.skypilot_standin import StandIn

MINE = {"areal-sky-cluster": "c", "areal-sky-owner": "me"}
SECRET = "hush-hush"


def plan(name: str, nodes: int = 1) -> GroupPlan:
    shape = NodeShape()
    offer = Offer("slurm", "here", None, "", shape, "on_demand", None, "")
    return GroupPlan(name, name != "head", 1, 4, nodes, "on_demand", 0, shape, offer)


def asked(group: str, slot: int = 0, nodes: int = 1) -> LaunchRequest:
    return LaunchRequest("c", f"c-{group}-{slot}", plan(group, nodes), "on_demand")


def task(request: LaunchRequest, head_ip: str) -> Mapping[str, Any]:
    base = {"resources": {"labels": {"areal-sky-cluster": "c"}}, "secrets": {"T": None}}
    return filled(base, request, owner="me", envs={"AREAL_SKY_HEAD_IP": head_ip}, secrets={"T": SECRET})


@pytest.fixture
def api() -> StandIn:
    return StandIn()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORKER_RESTS_S", "REQUESTS_S", "REQUESTS_IDLE_S", "RECORDS_S", "RECORDS_IDLE_S"):
        monkeypatch.setattr(cloud_module, name, 0.01)
    monkeypatch.setattr(cloud_module, "REFRESH_S", 0.05)
    monkeypatch.setattr("areal_sky.adapters.skypilot.acts.RETRY_S", 0.05)


Start = Callable[..., SkyCloud]


@pytest.fixture
def start(api: StandIn) -> Iterator[Start]:
    made: list[SkyCloud] = []

    def begin(launched: Mapping[str, str] | None = None) -> SkyCloud:
        groups = ("head", "rollout", "trainer")
        cloud = SkyCloud("c", "me", task, launched or {}, groups, api, lambda t: t.replace(SECRET, "***"))  # type: ignore[arg-type]
        made.append(cloud)
        cloud.start()
        until(lambda: seen(cloud) is not None)
        return cloud

    yield begin
    for cloud in made:
        cloud.stop()


def until(condition: Callable[[], Any], timeout_s: float = 5.0) -> Any:
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        if value := condition():
            return value
        time.sleep(0.005)
    raise AssertionError("did not come true")


def seen(cloud: SkyCloud) -> dict[str, Machine] | None:
    try:
        return {m.replica: m for m in cloud.machines()}
    except ArealSkyError:
        return None


def state(cloud: SkyCloud, name: str) -> MachineState | None:
    machine = (seen(cloud) or {}).get(name)
    return machine.state if machine else None


def bring_up(cloud: SkyCloud, api: StandIn, request: LaunchRequest) -> None:
    until(lambda: cloud.launch(request))
    api.finish(request.replica)
    until(lambda: state(cloud, request.replica) is MachineState.UP)


def test_a_launch_goes_from_nothing_to_up_and_is_asked_for_once(api: StandIn, start: Start) -> None:
    cloud = start()
    assert cloud.launch(asked("head")) == "" and seen(cloud) == {}
    request_id = until(lambda: cloud.launch(asked("head")))
    machine = (seen(cloud) or {})["c-head-0"]
    assert (machine.state, machine.request_id) == (MachineState.STARTING, request_id)
    until(lambda: (seen(cloud) or {})["c-head-0"].note == "provisioning")
    api.finish("c-head-0")
    until(lambda: state(cloud, "c-head-0") is MachineState.UP)
    assert api.count("launch") == 1
    assert api.tasks["c-head-0"]["secrets"] == {"T": SECRET}


def test_groups_wait_for_the_heads_address_and_are_told_it(api: StandIn, start: Start) -> None:
    cloud = start()
    cloud.launch(asked("rollout"))
    time.sleep(0.1)
    assert api.count("launch") == 0
    bring_up(cloud, api, asked("head"))
    until(lambda: cloud.launch(asked("rollout")))
    assert api.tasks["c-rollout-0"]["envs"]["AREAL_SKY_HEAD_IP"] == "10.0.0.1"


def test_at_most_four_launches_are_in_flight_and_large_ones_go_first(api: StandIn, start: Start) -> None:
    cloud = start()
    bring_up(cloud, api, asked("head"))
    wanted = [asked("rollout", i) for i in range(5)] + [asked("trainer", 0, nodes=4)]
    with cloud._board.lock:
        for request in wanted:
            cloud.launch(request)
    until(lambda: api.count("launch") == 5)
    time.sleep(0.1)
    assert api.count("launch") == 5 and "c-trainer-0" in api.tasks
    for request in wanted:
        cloud.launch(request)
    api.finish("c-trainer-0")
    until(lambda: api.count("launch") == 6)


def test_a_failed_launch_says_why_without_secrets_and_is_cleaned_up(api: StandIn, start: Start) -> None:
    cloud = start()
    until(lambda: cloud.launch(asked("head")))
    api.finish("c-head-0", NoCapacity(f"none left, said {SECRET}"))
    until(lambda: state(cloud, "c-head-0") is MachineState.FAILED)
    machine = (seen(cloud) or {})["c-head-0"]
    assert machine.error == "none left, said ***" and machine.no_capacity
    cloud.terminate("c-head-0")
    until(lambda: api.count("down"))
    assert state(cloud, "c-head-0") is MachineState.STOPPING
    api.finish("c-head-0", kind=DOWN)
    until(lambda: seen(cloud) == {})


def test_what_is_refused_at_once_is_raised_by_the_next_launch_and_tried_again(api: StandIn, start: Start) -> None:
    cloud = start()
    api.refuse = NoCapacity(f"no {SECRET}")
    with pytest.raises(NoCapacity, match=r"no \*\*\*"):
        until(lambda: cloud.launch(asked("head")))
    assert seen(cloud) == {}
    api.refuse = None
    bring_up(cloud, api, asked("head"))


def test_a_cluster_of_that_name_that_others_made_is_neither_taken_nor_touched(api: StandIn, start: Start) -> None:
    api.records["c-head-0"] = SkyCluster("c-head-0", "UP", 1, ("10.9.9.9",), {"areal-sky-cluster": "c"}, user="eve")
    cloud = start()
    assert seen(cloud) == {}
    with pytest.raises(AlreadyExists, match="user eve"):
        until(lambda: cloud.launch(asked("head")))
    cloud.terminate("c-head-0")
    until(lambda: not cloud._board.endings)
    assert api.count("launch") == api.count("down") == 0 and "c-head-0" in api.records


def test_a_launch_of_others_under_our_name_is_not_taken_for_ours(api: StandIn, start: Start) -> None:
    cloud = start()
    api.launch({"resources": {"labels": {}}}, "c-rollout-0")  # somebody's `sky launch`, beside us
    until(lambda: api.active() and seen(cloud) is not None)
    time.sleep(0.05)
    api.finish("c-rollout-0")
    bring_up(cloud, api, asked("head"))
    with pytest.raises(AlreadyExists, match="did not make"):
        until(lambda: cloud.launch(asked("rollout")))
    cloud.terminate("c-rollout-0")
    time.sleep(0.1)
    assert api.count("down") == 0 and api.count("cancel") == 0


def test_a_launch_in_flight_of_a_killed_controller_is_found_again(api: StandIn, start: Start) -> None:
    first = start()
    request_id = until(lambda: first.launch(asked("head")))
    first.stop()
    second = start()  # the id was never written down
    machine = (seen(second) or {})["c-head-0"]
    assert (machine.state, machine.request_id) == (MachineState.STARTING, request_id)
    assert second.launch(asked("head")) == request_id
    api.finish("c-head-0")
    until(lambda: state(second, "c-head-0") is MachineState.UP)
    assert api.count("launch") == 1


def test_a_cluster_that_is_up_is_never_launched_again(api: StandIn, start: Start) -> None:
    api.records["c-head-0"] = SkyCluster("c-head-0", "UP", 1, ("10.0.0.1",), MINE)
    cloud = start()
    for _ in range(20):
        cloud.launch(asked("head"))
        time.sleep(0.01)
    assert state(cloud, "c-head-0") is MachineState.UP and api.count("launch") == 0


def test_a_server_that_is_gone_makes_everything_unknown_until_it_answers(api: StandIn, start: Start) -> None:
    cloud = start()
    request_id = until(lambda: cloud.launch(asked("head")))
    api.gone = True
    until(lambda: seen(cloud) is None)
    with pytest.raises(Unreachable, match="no API server"):
        cloud.machines()
    api.gone = False
    until(lambda: state(cloud, "c-head-0") is MachineState.STARTING)
    assert cloud.launch(asked("head")) == request_id
    api.finish("c-head-0")
    until(lambda: state(cloud, "c-head-0") is MachineState.UP)


@pytest.mark.parametrize(
    ("status", "job", "end"),
    [
        ("UP", "", MachineState.UP),  # it had come through
        ("UP", None, MachineState.FAILED),  # machines, but the task never started
        ("UP", NotFound("not properly set up"), MachineState.FAILED),  # machines, but SkyPilot is not on them
        ("UP", ArealSkyError("try later"), MachineState.UP),  # nothing is known of the task, so nothing is done
        ("INIT", "", MachineState.FAILED),  # half-way
        (None, "", MachineState.FAILED),  # nothing yet
    ],
)
def test_a_launch_that_a_restarted_server_forgot_is_judged_by_what_there_is(
    api: StandIn, start: Start, monkeypatch: pytest.MonkeyPatch, status: str | None,
    job: str | ArealSkyError | None, end: MachineState,
) -> None:  # fmt: skip
    monkeypatch.setattr(judge, "LOST_GRACE_S", 0.05)
    cloud = start({"c-head-0": "r-of-old"})
    if status is not None:
        api.records["c-head-0"] = SkyCluster("c-head-0", status, 1, ("10.0.0.1",), MINE)
    api.jobs["c-head-0"] = job
    until(lambda: state(cloud, "c-head-0") is end and (status != "UP" or api.count("jobs")))
    time.sleep(0.1)
    assert state(cloud, "c-head-0") is end and api.count("launch") == 0


def test_an_end_is_repeated_and_its_reason_shown_until_it_is_confirmed(api: StandIn, start: Start) -> None:
    cloud = start()
    bring_up(cloud, api, asked("head"))
    cloud.terminate("c-head-0")
    until(lambda: api.count("down") == 1)
    api.finish("c-head-0", ArealSkyError(f"cannot: {SECRET}"), kind=DOWN)
    until(lambda: "cannot: ***" in (seen(cloud) or {})["c-head-0"].error)
    assert state(cloud, "c-head-0") is MachineState.STOPPING
    until(lambda: cloud.terminate("c-head-0") or api.count("down") == 2)
    api.finish("c-head-0", kind=DOWN)
    until(lambda: seen(cloud) == {})


def test_an_end_cancels_the_launch_in_flight_and_a_waiting_one_is_dropped(api: StandIn, start: Start) -> None:
    cloud = start()
    request_id = until(lambda: cloud.launch(asked("head")))
    cloud.launch(asked("rollout"))
    cloud.terminate("c-rollout-0")
    cloud.terminate("c-head-0")
    until(lambda: api.count("down"))
    assert ("cancel", request_id) in api.calls
    assert ("down", "c-rollout-0") not in api.calls
    api.finish("c-head-0", kind=DOWN)
    until(lambda: seen(cloud) == {})


def test_an_end_of_a_controller_before_this_one_is_joined(api: StandIn, start: Start) -> None:
    api.records["c-head-0"] = SkyCluster("c-head-0", "UP", 1, ("10.0.0.1",), MINE)
    api.down("c-head-0")
    cloud = start()
    cloud.terminate("c-head-0")
    time.sleep(0.1)
    assert api.count("down") == 1
    api.finish("c-head-0", kind=DOWN)
    until(lambda: seen(cloud) == {})


def test_a_doubt_asks_the_cloud_and_finds_the_machine_gone_or_its_task_ended(api: StandIn, start: Start) -> None:
    cloud = start()
    bring_up(cloud, api, asked("head"))
    until(lambda: cloud.doubt("c-head-0") or (api.count("refresh") and api.count("jobs")))
    assert state(cloud, "c-head-0") is MachineState.UP
    api.jobs["c-head-0"] = "its task ended as FAILED_SETUP"
    until(lambda: cloud.doubt("c-head-0") or state(cloud, "c-head-0") is MachineState.FAILED)
    assert "FAILED_SETUP; `sky logs c-head-0`" in (seen(cloud) or {})["c-head-0"].error
    api.records.clear()
    until(lambda: seen(cloud) == {})


def test_a_successor_is_asked_about_as_soon_as_the_first_of_its_name(
    api: StandIn, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud = start()
    bring_up(cloud, api, asked("head"))
    until(lambda: cloud.doubt("c-head-0") or api.count("refresh") >= 4)  # found well each time: asked ever less often
    cloud.terminate("c-head-0")
    until(lambda: api.count("down"))
    api.finish("c-head-0", kind=DOWN)
    until(lambda: seen(cloud) == {})
    monkeypatch.setattr(cloud_module, "REFRESH_S", 1.0)
    bring_up(cloud, api, asked("head"))
    asked_before = api.count("refresh")
    until(lambda: cloud.doubt("c-head-0") or api.count("refresh") > asked_before, timeout_s=6)  # not after 8


def test_a_cluster_that_lost_nodes_or_was_stopped_is_failed(api: StandIn, start: Start) -> None:
    cloud = start()
    bring_up(cloud, api, asked("head"))
    record = api.records["c-head-0"]
    api.records["c-head-0"] = replace(record, status="INIT", unhealthy=True, note="1 of 2 nodes")
    until(lambda: state(cloud, "c-head-0") is MachineState.FAILED)
    assert "1 of 2 nodes" in (seen(cloud) or {})["c-head-0"].error
    api.records["c-head-0"] = replace(record, status="STOPPED")
    until(lambda: "stopped" in (seen(cloud) or {})["c-head-0"].error)


def test_the_way_to_the_head_is_known_once_it_is_up_and_follows_its_address(api: StandIn, start: Start) -> None:
    cloud = start()
    assert cloud.head_seat() is None
    bring_up(cloud, api, asked("head"))
    seat = until(cloud.head_seat)
    assert (seat.host, seat.private_ip) == ("c-head-0", "10.0.0.1")
    api.records["c-head-0"] = replace(api.records["c-head-0"], private_ips=("10.0.0.2",))
    until(lambda: (found := cloud.head_seat()) and found.private_ip == "10.0.0.2")


def test_nothing_blocks_while_the_server_takes_its_time(api: StandIn, start: Start) -> None:
    cloud = start()
    bring_up(cloud, api, asked("head"))
    slow = api.clusters
    api.clusters = lambda *a, **k: time.sleep(0.3) or slow(*a, **k)  # type: ignore[method-assign]
    began_s = time.monotonic()
    for _ in range(20):
        cloud.machines(), cloud.launch(asked("rollout")), cloud.doubt("c-head-0"), cloud.terminate("c-rollout-3")
    assert time.monotonic() - began_s < 0.1
