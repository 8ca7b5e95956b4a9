"""Scaling decisions: what each policy does, and the guards that hold around any policy."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_sky.core.model import Bundle, GangDemand, GroupPlan, NodeShape, NodeView, Offer
from areal_sky.core.scaling import ScalingContext, ScalingDecision, assign_demand, decide, hold
from areal_sky.core.scaling_policies import BUILT_IN, demand_and_utilization, demand_only, fixed
from areal_sky.core.telemetry import Validity
from areal_sky.core.view import ReplicaLoad

NOW_S = 10_000.0
H100 = NodeShape(gpus=8, cpus=96, memory_gib=1000, accelerator="H100")
balance = demand_and_utilization({})


def group(name="rollout", shape=H100, least=0, most=8, nodes=1, price: float | None = 10.0, elastic=True) -> GroupPlan:
    offer = Offer("aws", "us-east-1", None, "p5", shape, "spot", price, "test")
    return GroupPlan(name, elastic, least, most, nodes, "spot", 0, shape, offer)


def load(slot: int, idle_s: float | None = None, use: float = 0.0, validity=Validity.KNOWN, **more) -> ReplicaLoad:
    """A replica that works (idle_s None), or has been idle for so long."""
    fields = {
        "replica": f"c-rollout-{slot}", "group": "rollout", "nodes_alive": 1,
        "running_tasks": 1 if idle_s is None else 0, "utilization_mean": use if validity is Validity.KNOWN else None,
        "validity": validity, "age_s": 1.0, "idle_since_s": None if idle_s is None else NOW_S - idle_s,
    } | more  # fmt: skip
    return ReplicaLoad(**fields)


def gang(task_id="t1", bundles=1, gpus=8.0, group=None, accelerators=()) -> GangDemand:
    return GangDemand(task_id, group, bundles, Bundle(gpus=gpus), accelerators, score=1.0, waiting_s=5.0)


def context(plan: GroupPlan | None = None, loads=(), demand=(), desired: int | None = None, **more) -> ScalingContext:
    fields = {
        "now_s": NOW_S, "starting": 0, "target_utilization": 0.85, "cooldown_s": 120.0, "idle_s": 300.0,
        "last_grow_s": None, "last_shrink_s": None,
    } | more  # fmt: skip
    ready = len(loads)
    return ScalingContext(
        group=plan or group(), desired=ready if desired is None else desired, ready=ready, loads=tuple(loads),
        demand=tuple(demand), **fields,
    )  # fmt: skip


# ---------------------------------------------------------------- growing for demand


def test_it_grows_by_what_the_waiting_gangs_need():
    waiting = [gang("t1", gpus=8), gang("t2", 2, gpus=4), gang("t3", gpus=2)]
    d = decide(balance, context(loads=[load(0)], demand=waiting))
    assert d.desired == 1 + 3
    assert d.reason == "t1 and 2 more tasks waiting: needs 3 replicas more"


def test_small_gangs_share_a_new_replica():
    d = decide(balance, context(demand=[gang(f"t{i}", gpus=2) for i in range(5)]))
    assert d.desired == 2  # 4 x 2 GPUs on the first, the fifth on another


def test_fractions_are_counted_per_device():
    # 0.6 of a GPU twice does not fit one device: eight such bundles fill an 8-GPU node, not thirteen.
    assert decide(balance, context(demand=[gang(bundles=9, gpus=0.6)])).desired == 2


def test_a_gang_of_many_nodes_gets_them_all_at_once():
    d = decide(balance, context(group(nodes=2), demand=[gang(bundles=6, gpus=8)]))
    assert d.desired == 3  # replicas of two nodes each


def test_what_is_starting_or_free_already_is_not_asked_for_again():
    starting = context(loads=[load(0)], demand=[gang()], desired=2, starting=1)
    assert decide(balance, starting).desired == 2
    assert "is starting (1 replica)" in decide(balance, starting).reason
    half = context(loads=[load(0, idle_s=1)], demand=[gang(bundles=3)])
    assert decide(balance, half).desired == 3  # one idle replica and two new ones


def test_free_room_on_busy_nodes_counts_when_it_is_known():
    node = NodeView("n0", "rollout", "c-rollout-0", 0, H100, free_gpus=4, free_cpus=90, free_memory_gib=900)
    assert decide(balance, context(loads=[load(0)], nodes=(node,), demand=[gang(bundles=3, gpus=4)])).desired == 2
    # The nodes of a replica that still starts are counted as starting, not twice.
    early = dataclasses.replace(node, node_id="n1", replica="c-rollout-1", free_gpus=8)
    ctx = context(loads=[load(0)], nodes=(node, early), demand=[gang(bundles=3, gpus=8)], desired=2)
    assert decide(balance, ctx).desired == 4
    draining = dataclasses.replace(node, draining=True)
    assert decide(balance, context(loads=[load(0)], nodes=(draining,), demand=[gang(gpus=4)])).desired == 2


def test_a_gang_that_does_not_fit_below_max_grows_nothing_but_lets_smaller_ones_grow():
    plan = group(most=3)
    full = [load(0), load(1)]
    d = decide(balance, context(plan, full, [gang("big", bundles=2)]))
    assert (d.desired, d.reason) == (2, "big waiting, but no room is left below max_replicas 3")
    d = decide(balance, context(plan, full, [gang("big", bundles=2), gang("small", gpus=1)]))
    assert d.desired == 3
    assert d.reason == "small waiting: needs 1 replica more; big would not fit below max_replicas 3"


def test_demand_that_the_group_can_never_run_is_none():
    never = [
        gang(gpus=9), gang(bundles=9), gang(accelerators=("A100-80GB",)), gang(group="trainer"),
    ]  # fmt: skip
    d = decide(balance, context(loads=[load(0)], demand=never))
    assert (d.desired, d.reason) == (1, "nothing waits, and no replica has been idle for 5 min")
    assert decide(balance, context(demand=[gang(accelerators=("h100",))])).desired == 1


def test_growth_can_be_limited_per_decision():
    d = decide(demand_and_utilization({"grow_at_most": 1}), context(demand=[gang(bundles=4)]))
    assert (d.desired, d.reason) == (1, "t1 waiting: needs 4 replicas more, 1 at a time")


def test_a_group_without_gpus_grows_for_cpus():
    cpu = group(shape=NodeShape(cpus=16, memory_gib=64))
    demand = [GangDemand("t1", None, 4, Bundle(cpus=8), (), 1.0, 1.0)]
    assert decide(balance, context(cpu, demand=demand)).desired == 2


# ---------------------------------------------------------------- growing by utilization


def test_busy_gpus_and_waiting_work_grow_by_one():
    # On paper the idle replica holds the gang; but its GPUs are in use by someone else.
    loads = [load(0, use=0.9), load(1, idle_s=5, use=0.95)]
    d = decide(balance, context(loads=loads, demand=[gang()]))
    assert (d.desired, d.reason) == (3, "t1 waiting and the GPUs are busier than 85%")
    assert decide(demand_only({}), context(loads=loads, demand=[gang()])).desired == 2


@pytest.mark.parametrize(
    ("loads", "demand"),
    [
        ([load(0, use=0.9), load(1, use=0.95)], []),  # nothing waits
        ([load(0, use=0.9), load(1, idle_s=5, use=0.1)], [gang()]),  # below the target
        ([load(0, use=0.9), load(1, idle_s=5, validity=Validity.UNKNOWN)], [gang()]),  # not known of all
    ],
)
def test_utilization_alone_or_in_doubt_grows_nothing(loads, demand):
    assert decide(balance, context(loads=loads, demand=demand)).desired == 2


# ---------------------------------------------------------------- shrinking


def test_the_longest_idle_goes_first_and_never_below_min():
    loads = [load(0, idle_s=400), load(1, idle_s=900), load(2, idle_s=600), load(3)]
    d = decide(balance, context(loads=loads))
    assert (d.desired, d.victims) == (1, ("c-rollout-1", "c-rollout-2", "c-rollout-0"))
    assert d.reason == "nothing waits, and c-rollout-1, c-rollout-2, c-rollout-0 have been idle for 5 min"
    d = decide(balance, context(group(least=3), loads))
    assert (d.desired, d.victims) == (3, ("c-rollout-1",))
    d = decide(balance, context(group(least=4), loads))
    assert (d.desired, d.reason) == (4, "nothing waits, but the group is at its min_replicas 4")
    d = decide(demand_and_utilization({"shrink_at_most": 1}), context(loads=loads))
    assert (d.desired, d.victims) == (3, ("c-rollout-1",))


def test_busy_or_just_idle_replicas_stay():
    assert decide(balance, context(loads=[load(0), load(1, idle_s=299)])).desired == 2


@pytest.mark.parametrize("validity", [Validity.UNKNOWN, Validity.STALE, Validity.LOST])
def test_unknown_never_scales_in(validity):
    d = decide(balance, context(loads=[load(0, idle_s=900, validity=validity)]))
    assert d.desired == 1
    assert d.reason == f"c-rollout-0 has no task, but the GPU load is {validity}: unknown never scales in"


def test_a_group_without_gpus_needs_no_telemetry_to_shrink():
    cpu = group(shape=NodeShape(cpus=16))
    assert decide(balance, context(cpu, [load(0, idle_s=900, validity=Validity.UNKNOWN)])).desired == 0


def test_a_replica_that_works_for_others_is_not_idle():
    d = decide(balance, context(loads=[load(0, idle_s=900, use=0.4)]))
    assert (d.desired, d.reason) == (1, "c-rollout-0 has no task of ours, but the GPUs are in use")


def test_nothing_shrinks_while_a_waiting_gang_could_use_it():
    loads = [load(0, idle_s=900), load(1, idle_s=900)]
    assert decide(balance, context(loads=loads, demand=[gang(bundles=3)], desired=3)).desired == 3
    assert decide(balance, context(group(most=3), [*loads, load(2)], [gang(bundles=3)])).desired == 3


# ---------------------------------------------------------------- guards


def always(desired: int, *victims: str, urgent: bool = False):
    return lambda ctx: ScalingDecision(ctx.group.name, desired, "because", victims, urgent)


def test_bounds_hold_for_any_policy():
    ctx = context(group(least=1, most=4), [load(0, idle_s=0), load(1, idle_s=0)])
    assert decide(always(9), ctx).desired == 4
    assert decide(always(9), ctx).reason == "because; held at max_replicas 4"
    d = decide(always(-3, "c-rollout-0", "c-rollout-1"), ctx)
    assert (d.desired, d.victims, d.reason) == (1, ("c-rollout-0",), "because; held at min_replicas 1")


def test_a_group_outside_its_bounds_is_brought_back():
    d = decide(always(7), context(group(most=2), [load(0), load(1), load(2)], last_grow_s=NOW_S - 1))
    assert (d.desired, d.reason) == (2, "back within its bounds of 0 to 2 replicas")


def test_a_fixed_group_does_not_scale():
    assert decide(always(7), context(group(elastic=False), [load(0)])).desired == 1


@pytest.mark.parametrize(("desired", "change"), [(3, "growth"), (1, "growth"), (3, "shrink"), (1, "shrink")])
def test_cooldown_holds_every_change_then_lets_it_go(desired: int, change: str):
    key = {"growth": "last_grow_s", "shrink": "last_shrink_s"}[change]
    loads = [load(0, idle_s=0), load(1, idle_s=0)]
    d = decide(always(desired), context(loads=loads, **{key: NOW_S - 119}))
    assert d.desired == 2
    assert d.reason == f"because; held by the cooldown of 2 min after the last {change}"
    assert decide(always(desired), context(loads=loads, **{key: NOW_S - 120})).desired == desired


def test_a_policy_cannot_call_a_shrink_urgent():
    loads = [load(0, idle_s=0), load(1, idle_s=0)]
    assert decide(always(1, urgent=True), context(loads=loads, last_grow_s=NOW_S - 1)).desired == 2


def test_work_that_fits_nowhere_waits_only_for_a_shrink_to_cool_down():
    ctx = context(loads=[load(0)], demand=[gang()], last_grow_s=NOW_S - 1)
    assert decide(balance, ctx).desired == 2
    assert decide(balance, dataclasses.replace(ctx, last_shrink_s=NOW_S - 1)).desired == 1


def test_victims_are_chosen_where_the_policy_names_none():
    loads = [load(0), load(1, idle_s=10), load(2, idle_s=50), load(3, idle_s=99, validity=Validity.STALE)]
    d = decide(always(2), context(loads=loads))
    assert (d.desired, d.victims) == (2, ("c-rollout-2", "c-rollout-1"))


def test_unknown_replicas_are_kept_even_if_the_policy_names_them():
    loads = [load(0, idle_s=9, validity=Validity.LOST), load(1, idle_s=9)]
    d = decide(always(0, "c-rollout-0", "c-rollout-1", "nonsense"), context(loads=loads))
    assert (d.desired, d.victims) == (1, ("c-rollout-1",))
    assert d.reason == "because; 1 replica kept, for unknown load never scales in"


def test_replicas_that_are_not_ready_may_be_given_up():
    blind = load(0, validity=Validity.UNKNOWN)
    d = decide(always(1), context(loads=[blind], desired=3, starting=2))
    assert (d.desired, d.victims) == (1, ())


@pytest.mark.parametrize("bad", [lambda ctx: 1 / 0, lambda ctx: None, lambda ctx: always(2.5)(ctx)])
def test_a_broken_policy_changes_nothing_and_the_reason_says_so(bad):
    d = decide(bad, context(loads=[load(0)]))
    assert d.desired == 1
    assert "the policy failed: ZeroDivisionError" in d.reason or "must return a ScalingDecision" in d.reason


def test_options_are_checked():
    for wrong in ({"grow_at_mots": 1}, {"grow_at_most": -1}, {"grow_at_most": 1.5}, {"idle_utilization": "x"}):
        with pytest.raises(ValueError, match="option"):
            demand_and_utilization(wrong)
    with pytest.raises(ValueError, match="options: none"):
        fixed({"x": 1})
    assert decide(fixed({}), context(loads=[load(0, idle_s=9e9)], demand=[gang()])).desired == 1


# ---------------------------------------------------------------- whose demand


def view(node_group: str, slot: int, free_gpus: float, shape: NodeShape = H100) -> NodeView:
    return NodeView(f"{node_group}{slot}", node_group, f"c-{node_group}-{slot}", 0, shape, free_gpus, 96, 1000)


def test_demand_goes_where_it_is_named_else_where_it_is_cheapest():
    dear, cheap, free = group("dear", price=30.0), group("cheap", price=10.0), group("unpriced", price=None)
    static = group("static", elastic=False, price=1.0)
    named, any_one, pinned = gang("named", group="dear"), gang("any"), gang("pinned", group="static")
    assert assign_demand([named, any_one, pinned], [dear, free, cheap, static]) == {
        "dear": (named,), "unpriced": (), "cheap": (any_one,),
    }  # fmt: skip


def test_cheapest_counts_all_replicas_that_the_gang_needs():
    one_gpu = group("one", shape=NodeShape(gpus=1, cpus=8, memory_gib=64), price=2.0)
    eight = group("eight", price=10.0)
    g = gang(bundles=8, gpus=1)
    assert assign_demand([g], [one_gpu, eight])["eight"] == (g,)


def test_a_full_cheap_group_passes_demand_on_and_keeps_what_it_grows_for():
    cheap, dear = group("cheap", price=10.0, most=2), group("dear", price=30.0)
    first, second, third = gang("a"), gang("b"), gang("c")
    busy = [view("cheap", 0, free_gpus=0)]
    # One more replica of `cheap` is possible, whether or not it is on its way already.
    assert assign_demand([first, second], [cheap, dear], busy, {"cheap": 1}) == {"cheap": (first,), "dear": (second,)}
    up = [*busy, view("cheap", 1, free_gpus=8)]
    assert assign_demand([first, second], [cheap, dear], up, {"cheap": 2}) == {"cheap": (first,), "dear": (second,)}
    tiny = group("dear", price=30.0, most=0)
    assert assign_demand([first, second, third], [cheap, tiny], busy, {"cheap": 1})["cheap"] == (first, second, third)


# ---------------------------------------------------------------- properties

gangs = st.lists(
    st.builds(gang, st.uuids().map(str), st.integers(1, 6), st.sampled_from([0.25, 0.6, 1.0, 2.0, 8.0])), max_size=5
)
validities = st.sampled_from(list(Validity))
policies = st.sampled_from([BUILT_IN[n]({}) for n in sorted(BUILT_IN)])


@st.composite
def contexts(draw: st.DrawFn, inside: bool = True) -> ScalingContext:
    least = draw(st.integers(0, 3))
    most = draw(st.integers(max(1, least), 8))
    loads = []
    for slot in range(draw(st.integers(0, most))):
        idle_s = draw(st.one_of(st.none(), st.floats(0, 2000)))
        loads.append(load(slot, idle_s, draw(st.floats(0, 1)), draw(validities), draining=draw(st.booleans())))
    desired = draw(st.integers(least, most) if inside else st.integers(0, 20))
    changed = st.one_of(st.none(), st.floats(NOW_S - 500, NOW_S))
    return context(
        group(least=least, most=most, nodes=draw(st.integers(1, 2))), loads, draw(gangs), desired,
        starting=max(0, desired - len(loads)), last_grow_s=draw(changed), last_shrink_s=draw(changed),
    )  # fmt: skip


wild = st.builds(
    lambda desired, victims, urgent: always(desired, *victims, urgent=urgent),
    st.integers(-5, 30), st.lists(st.sampled_from([f"c-rollout-{i}" for i in range(9)]), max_size=4), st.booleans(),
)  # fmt: skip


@given(contexts(inside=False), st.one_of(policies, wild))
def test_desired_is_always_within_the_bounds_and_the_reason_is_given(ctx, policy):
    d = decide(policy, ctx)
    assert ctx.group.min_replicas <= d.desired <= ctx.group.max_replicas
    assert d.reason and d.group == "rollout"
    assert d == decide(policy, ctx)  # deterministic


@given(contexts(), st.one_of(policies, wild))
def test_no_replica_with_unknown_load_is_ever_given_up(ctx, policy):
    d = decide(policy, ctx)
    by_name = {x.replica: x for x in ctx.loads}
    assert all(by_name[v].validity is Validity.KNOWN and not by_name[v].draining for v in d.victims)
    assert len(set(d.victims)) == len(d.victims)
    unready = max(0, ctx.desired - ctx.ready)
    assert ctx.desired - d.desired <= len(d.victims) + unready
    assert not d.victims or d.desired < ctx.desired


@given(contexts(), st.one_of(policies, wild))
def test_cooldown_is_respected(ctx, policy):
    d = decide(policy, ctx)
    recent_shrink = ctx.last_shrink_s is not None and NOW_S - ctx.last_shrink_s < ctx.cooldown_s
    recent_grow = ctx.last_grow_s is not None and NOW_S - ctx.last_grow_s < ctx.cooldown_s
    if recent_shrink:
        assert d.desired == ctx.desired
    if recent_grow and d.desired != ctx.desired:
        assert d.urgent and d.desired > ctx.desired


@settings(max_examples=60)
@given(
    least=st.integers(0, 2), most=st.integers(2, 8), start=st.integers(0, 8), demand=gangs, busy=st.integers(0, 3),
    use=st.floats(0, 1), policy=policies,
)  # fmt: skip
def test_constant_input_comes_to_rest_and_never_turns_around(least, most, start, demand, busy, use, policy):
    """A world in which nothing changes but what we decide: replicas start in 30 s, tasks neither start nor end."""
    plan = group(least=least, most=most)
    now_s, desired = NOW_S, min(max(start, least), most)
    born = dict.fromkeys(range(desired), NOW_S - 1000)
    last = {"grow": None, "shrink": None}
    moves: list[tuple[int, int]] = []
    for tick in range(300):
        loads = [
            load(i, None, use) if n < busy else load(i, 0, 0.0, idle_since_s=at + 30)
            for n, (i, at) in enumerate(sorted(born.items()))
            if now_s >= at + 30
        ]
        ctx = context(plan, loads, demand, desired, now_s=now_s, last_grow_s=last["grow"], last_shrink_s=last["shrink"])
        d = decide(policy, ctx)
        if d.desired != desired:
            moves.append((tick, d.desired - desired))
            last["grow" if d.desired > desired else "shrink"] = now_s
            for victim in d.victims:
                del born[int(victim.rsplit("-", 1)[1])]
            for slot in range(d.desired - len(born)):
                born[1000 + tick * 10 + slot] = now_s
            desired = d.desired
        now_s += 10
    assert all(tick < 150 for tick, _ in moves)  # at rest for the last 25 minutes
    directions = [change > 0 for _, change in moves]
    assert directions == sorted(directions) or directions == sorted(directions, reverse=True)
    assert len(set(directions)) <= 1


def test_hold_keeps_what_is_wanted():
    assert hold(context(loads=[load(0)]), "why") == ScalingDecision("rollout", 1, "why")
