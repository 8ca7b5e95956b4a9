"""Replays on the production engine: deterministic, nothing lost, and the laws of the orders."""

from __future__ import annotations

import statistics

import pytest

from areal_sky.adapters.traces import TraceTask
from areal_sky.core.order_policies import AttainedOrder, FifoOrder, ShortestOrder
from areal_sky.run.simulation.baselines import Srtf
from areal_sky.run.simulation.simtask import Clairvoyance
from benchmarks.placement import SEEDS, Ours, arrivals, fill
from benchmarks.placement import synthetic as cluster
from benchmarks.replay import LOST_S, gpus_for, replay
from benchmarks.scheduler_quality import synthetic, weights_of

TASKS = synthetic(150)
GPUS = gpus_for(TASKS)


def mean(order, **more) -> float:
    return statistics.fmean(replay(TASKS, order, GPUS, **more).completion_s)


def test_the_load_is_what_it_says():
    span_s = TASKS[-1].submitted_s - TASKS[0].submitted_s
    work = sum(t.duration_s * t.gpus for t in TASKS)
    assert work / (GPUS * span_s) <= 0.8 < work / ((GPUS - 1) * span_s)


def test_a_replay_is_deterministic():
    assert replay(TASKS, ShortestOrder(), GPUS) == replay(TASKS, ShortestOrder(), GPUS)


@pytest.mark.parametrize("order", [FifoOrder, AttainedOrder, ShortestOrder])
def test_nobody_ends_before_it_can(order):
    outcome = replay(TASKS, order(), GPUS)
    assert all(took >= t.duration_s - 1e-3 for took, t in zip(outcome.completion_s, TASKS, strict=True))
    alone = replay(TASKS[:1], order(), 8)
    assert alone.completion_s == pytest.approx([TASKS[0].duration_s])


def test_a_preemption_costs_its_victim_a_minute():
    tasks = [TraceTask(0.0, 10000.0, 8), TraceTask(5000.0, 100.0, 8)]
    known = Clairvoyance()
    outcome = replay(tasks, Srtf(known), 8, known=known)
    assert outcome.preemptions == 1
    assert outcome.completion_s == pytest.approx([10000.0 + 100.0 + LOST_S, 100.0])


def test_knowing_more_is_better_on_average():
    known = Clairvoyance()
    srtf = mean(Srtf(known), known=known)
    ours = mean(ShortestOrder())
    assert srtf < ours < mean(FifoOrder(), preemptible=False)
    assert mean(ShortestOrder(), estimates_s=[t.duration_s for t in TASKS]) < ours


def test_weight_makes_faster():
    weights = weights_of(TASKS)
    outcome = replay(TASKS, ShortestOrder(), GPUS, weights=weights)
    took = {
        w: statistics.fmean(c for c, x in zip(outcome.completion_s, weights, strict=True) if x == w) for w in (0.5, 2)
    }
    plain = replay(TASKS, ShortestOrder(), GPUS)
    without = {
        w: statistics.fmean(c for c, x in zip(plain.completion_s, weights, strict=True) if x == w) for w in (0.5, 2)
    }
    assert took[2] / took[0.5] < without[2] / without[0.5]


def test_a_full_cluster_is_never_overcommitted():
    nodes, pods = cluster()
    end, at_100 = fill(Ours(nodes), nodes, arrivals(pods, nodes, SEEDS[0]))
    assert 0 <= end <= at_100 < 0.2
