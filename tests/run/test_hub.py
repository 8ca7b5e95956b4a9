"""The head's telemetry hub: what is known of each GPU, and how far."""

from __future__ import annotations

import json
import threading
from dataclasses import asdict

import pytest

from areal_sky.adapters.windowstore import WindowStore
from areal_sky.core.heartbeat import read_heartbeat
from areal_sky.core.model import NodeShape
from areal_sky.core.nodeenv import GroupShape
from areal_sky.core.telemetry import GpuWindow, Validity
from areal_sky.core.windowcodec import to_wire
from areal_sky.errors import InvalidInput
from areal_sky.run import hub as hub_module
from areal_sky.run.hub import TelemetryHub

K, U, S, L = Validity.KNOWN, Validity.UNKNOWN, Validity.STALE, Validity.LOST
T = 1000.0


def window(end_s: float, use: float | None = 0.5, device: int = 0, validity: Validity = K, error: str = "") -> dict:
    w = GpuWindow(
        device, "H100", end_s - 1, end_s, use, use, use, 10.0, 80.0, 60.0, 300.0, 0.0 if use is None else 1.0,
        validity, error,
    )  # fmt: skip
    return json.loads(json.dumps(asdict(w)))


def body(t_s: float = T, windows=None, replica: str = "c-rollout-0", index: int = 0, gpus: int = 1, **more) -> dict:
    return {
        "cluster": "c", "group": "rollout", "replica": replica, "index": index, "t_s": t_s, "pid": 1,
        "raylet_alive": True, "gpus": gpus, "interval_s": 1.0, "windows": windows or [],
    } | more  # fmt: skip


def take(hub: TelemetryHub, now_s: float, t_s: float | None = None, **told) -> dict:
    """A heartbeat that comes at `now_s`, and left when the node's clock showed `t_s`."""
    return hub.ingest(read_heartbeat(body(now_s if t_s is None else t_s, **told), now_s), now_s)


def gpus_of(hub: TelemetryHub, now_s: float, seconds: float = 10) -> list[dict]:
    return [gpu for node in hub.gpus(seconds, now_s)["nodes"] for gpu in node["gpus"]]


def test_load_per_replica_over_all_its_nodes():
    hub = TelemetryHub()
    take(hub, T, windows=[window(T, 0.2), window(T, 0.4, device=1)], gpus=2)
    take(hub, T, windows=[window(T, 0.9)], index=1)
    take(hub, T, windows=[window(T, 0.1)], replica="c-rollout-1")
    loads = hub.replica_loads(T + 1)
    assert loads["c-rollout-0"] == (pytest.approx(0.5), K, 1.0)
    assert loads["c-rollout-1"] == (pytest.approx(0.1), K, 1.0)
    json.dumps(hub.gpus(10, T))


@pytest.mark.parametrize(
    ("windows", "gpus", "validity"),
    [
        ([window(T)], 2, U),  # the node has two GPUs and tells of one
        ([], 1, U),
        ([window(T, None, validity=U)], 1, U),
        ([window(T), window(T, None, device=1, validity=L)], 2, L),
        ([window(T - 60)], 1, S),
        ([], 0, U),  # no GPU: nothing to know
    ],
)
def test_what_is_not_known_of_every_gpu_is_not_known(windows, gpus, validity):
    hub = TelemetryHub()
    take(hub, T, windows=windows, gpus=gpus)
    mean, found, _ = hub.replica_loads(T)["c-rollout-0"]
    assert (mean, found) == (None, validity)


def test_a_node_never_heard_of_makes_its_replica_unknown():
    hub = TelemetryHub([GroupShape("rollout", NodeShape(gpus=1), nodes_per_replica=2, min_replicas=0, max_replicas=4)])
    take(hub, T, windows=[window(T)])
    assert hub.replica_loads(T)["c-rollout-0"].validity is U
    take(hub, T, windows=[window(T)], index=1)
    assert hub.replica_loads(T)["c-rollout-0"].validity is K


def test_silence_makes_stale_then_forgets():
    hub = TelemetryHub(lease_s=600)
    take(hub, T, windows=[window(T, 0.7)])
    assert hub.replica_loads(T + 9)["c-rollout-0"].utilization_mean == 0.7
    assert hub.replica_loads(T + 11)["c-rollout-0"] == (None, S, 11.0)
    (gpu,) = gpus_of(hub, T + 30)
    assert (gpu["validity"], gpu["utilization"], gpu["age_s"]) == ("stale", None, 30.0)
    assert gpu["memory_used_gib"] == 10.0  # the last that was known, with its age
    assert hub.alive_nodes(T + 10) == {("c-rollout-0", 0)}
    assert hub.alive_nodes(T + 20) == frozenset()
    assert hub.replica_loads(T + 601) == {} and hub.gpus(10, T + 601)["nodes"] == []


def test_a_node_that_leaves_is_forgotten_at_once():
    hub = TelemetryHub()
    take(hub, T, windows=[window(T)])
    take(hub, T + 1, leaving=True)
    assert hub.replica_loads(T + 1) == {} and hub.alive_nodes(T + 1) == frozenset()
    take(hub, T + 2)
    hub.forget("c-rollout-0")
    assert hub.gpus(10, T + 2)["nodes"] == []


def test_silence_after_a_drain_is_the_expected_end():
    hub = TelemetryHub()
    take(hub, T, windows=[window(T)])
    hub.expect_end("c-rollout-0")
    take(hub, T + 5)  # it drains, and still beats
    assert len(hub.gpus(10, T + 20)["nodes"]) == 1
    assert hub.gpus(10, T + 21)["nodes"] == []
    take(hub, T + 60)  # a new replica in the same slot
    assert len(hub.gpus(10, T + 90)["nodes"]) == 1


def test_a_wrong_clock_on_a_node_changes_nothing():
    hub, wrong = TelemetryHub(), T - 5000
    take(hub, T, t_s=wrong + 0.5, windows=[window(wrong, 0.6)])
    assert hub.replica_loads(T) == {"c-rollout-0": (0.6, K, 0.5)}


def test_a_window_sent_twice_counts_once():
    hub = TelemetryHub()
    take(hub, T, windows=[window(T - 1, 0.2), window(T, 0.4)])
    take(hub, T + 1.2, t_s=T + 1, windows=[window(T - 1, 0.2), window(T, 0.4), window(T + 1, 0.6)])
    (gpu,) = gpus_of(hub, T + 1.2, seconds=4)
    assert gpu["history"] == [None, 0.2, 0.4, 0.6]
    assert hub.replica_loads(T + 1.2)["c-rollout-0"].utilization_mean == pytest.approx(0.4)


def test_history_has_one_value_a_second_and_gaps_where_nothing_is_known():
    hub = TelemetryHub()
    for i in range(20):
        jitter = 0.004 if i % 2 else 0.0
        if i not in (12, 13):
            take(hub, T + i + jitter, t_s=T + i, windows=[window(T + i, i / 20)])
    (gpu,) = gpus_of(hub, T + 19 + 0.01, seconds=10)
    assert gpu["history"] == [i / 20 if i not in (12, 13) else None for i in range(10, 20)]


def test_rows_of_many_nodes_and_how_often_they_should_post():
    hub, answer = TelemetryHub(), {}
    for i in range(600):
        w = GpuWindow(0, "H100", T - 1, T, 0.5, 0.5, 0.5, 10.0, 80.0, 60.0, 300.0, 1.0, K, uuid="GPU-7", xid=79)
        answer = take(hub, T, windows=json.loads(json.dumps(to_wire([w]))), replica=f"r-{i}", dropped=3)
    assert answer == {"beat_s": 3.0}
    node = hub.gpus(10, T)["nodes"][0]
    assert (node["dropped_windows"], node["gpus"][0]["uuid"], node["gpus"][0]["xid"]) == (3, "GPU-7", 79)


def test_a_week_is_seen_in_a_few_points_over_a_restart_of_the_head(tmp_path):
    hub = TelemetryHub(store=WindowStore(tmp_path / "w.db"))
    for i in range(600):
        if not 200 < i <= 300:  # the node could not tell
            take(hub, T + i, windows=[window(T + i, 0.25 if i < 300 else 0.75)])
    hub.close()
    hub = TelemetryHub(store=WindowStore(tmp_path / "w.db"))
    take(hub, T + 600, windows=[window(T + 600, 0.75)])
    hub._store.flush()
    history = hub.gpus(600, T + 600, points=6)["nodes"][0]["gpus"][0]["history"]
    assert history == [pytest.approx(v, rel=1e-2) if v else None for v in (0.25, 0.25, None, 0.75, 0.75, 0.75)]
    hub.close()


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(hub_module, "KEEP_WINDOWS", 5)
    hub = TelemetryHub()
    for i in range(50):
        take(hub, T + i, windows=[window(T + i, i / 100)])
    (gpu,) = gpus_of(hub, T + 49, seconds=50)
    assert [v for v in gpu["history"] if v is not None] == [0.45, 0.46, 0.47, 0.48, 0.49]


def test_tasks_are_shown_on_their_gpus():
    hub = TelemetryHub()
    running = [
        {"task_id": "b", "rank": 0, "kind": "train", "gpus": [0, 1]},
        {"task_id": "a", "rank": 0, "kind": "eval", "gpus": [1]},
    ]
    take(hub, T, gpus=3, running=running, windows=[window(T, device=i) for i in range(3)])
    assert [g["tasks"] for g in gpus_of(hub, T)] == [["b"], ["a", "b"], []]


def test_a_gpu_that_should_be_there_is_listed_with_the_reason():
    hub = TelemetryHub()
    take(hub, T, gpus=2, windows=[window(T, device=1)])
    first, second = gpus_of(hub, T)
    assert (first["device"], first["validity"], first["error"]) == (0, "unknown", "its node has not reported this GPU")
    assert (second["device"], second["validity"]) == (1, "known")
    take(hub, T, replica="x", telemetry_error="NVML does not start: Driver Not Loaded")
    assert gpus_of(hub, T)[-1]["error"] == "NVML does not start: Driver Not Loaded"


@pytest.mark.parametrize(
    "change",
    [
        {"replica": ""}, {"replica": 7}, {"index": "x"}, {"t_s": None}, {"t_s": float("nan")}, {"windows": 5},
        {"windows": [{}]}, {"windows": [window(T) | {"validity": "splendid"}]}, {"windows": [window(T, device=-1)]},
        {"windows": [window(T) | {"end_s": float("inf")}]}, {"windows": [window(T) | {"device": 10**6}]},
        {"windows": ["x"]}, {"running": [{"task_id": "t"}]}, {"gpus": None},
    ],
)  # fmt: skip
def test_a_damaged_heartbeat_is_refused_whole(change):
    with pytest.raises(InvalidInput, match="heartbeat is damaged"):
        read_heartbeat(body(windows=[window(T)]) | change, T)
    with pytest.raises(InvalidInput):
        read_heartbeat({}, T)


def test_a_window_that_claims_to_know_without_a_number_is_unknown():
    hub = TelemetryHub()
    take(hub, T, windows=[window(T) | {"utilization_mean": None}])
    assert hub.replica_loads(T)["c-rollout-0"] == (None, U, 0.0)


def test_many_threads_at_once():
    hub, errors = TelemetryHub(), []

    def beat(node: int) -> None:
        try:
            for i in range(200):
                take(hub, T + i, replica=f"r{node}", windows=[window(T + i)])
                hub.replica_loads(T + i)
                hub.gpus(5, T + i)
        except Exception as e:
            errors.append(e)

    threads = [threading.Thread(target=beat, args=(n,)) for n in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert errors == []
    assert len(hub.alive_nodes(T + 199)) == 6
