"""Machines that no price table lists: guessed shapes without a price, and the pretend machines of `infra: local`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from areal_sky.core.market import NO_SPOT_CLOUDS
from areal_sky.core.model import NodeShape, Offer
from areal_sky.core.offers import (
    NO_PRICE,
    Choice,
    MachineType,
    Notes,
    best_first,
    matches,
    text_of,
)
from areal_sky.spec.accelerators import find
from areal_sky.spec.cluster import NodeGroupSpec

CHOSEN_AT_LAUNCH = "(chosen at launch)"
# SkyPilot's own default: 4 GiB for each vCPU.
GIB_PER_CPU = 4.0
# A guess: the GPU machines of the shipped table have 4 to 52 vCPUs per GPU; 4 is the low end.
GUESSED_CPUS_PER_GPU = 4.0


def guessed(group: NodeGroupSpec, choice: Choice, offers: Sequence[Offer], notes: Notes, local: bool) -> MachineType:
    """A machine of the shape that was asked for, the rest of it guessed, its price unknown."""
    ask, r = choice.ask, group.resources
    alike = [o for o in offers if ask is not None and matches(ask, o.shape)]
    count = 0.0 if ask is None else ask.count
    name = ask and ask.name  # of an ask by memory nobody knows yet which accelerator it will be
    known = name and find(name)
    tpu = ask is not None and (ask.name or "").lower().startswith("tpu")
    cpus = r.cpus or float(max(GUESSED_CPUS_PER_GPU, math.ceil(GUESSED_CPUS_PER_GPU * count)))
    shape = NodeShape(
        gpus=0.0 if tpu else count,
        cpus=cpus,
        memory_gib=r.memory_gib or GIB_PER_CPU * cpus,
        accelerator=name,
        gpu_memory_gib=known.memory_gib if known else ask and ask.min_memory_gib,
    )
    what = r.instance_type or text_of(ask)
    if not (r.cpus and r.memory_gib):
        notes.guesses.append(
            f"{group.name}: {what} nodes have {shape.cpus:g} vCPUs and {shape.memory_gib:g} GiB"
            + (f" ({GUESSED_CPUS_PER_GPU:g} vCPUs per GPU)" if count and not r.cpus else "")
        )
    where = "any cloud" if local else str(choice.place)
    counts = sorted({o.shape.gpus for o in alike if local or choice.place.allows(o.cloud, o.region)})
    hint = f" (the price table has {', '.join(f'{n:g}' for n in counts)} per machine)" if counts else ""
    notes.unknowns.append(f"{group.name}: {NO_PRICE} for {what} on {where}{hint}")
    if tpu:
        notes.unknowns.append(f"{group.name}: Ray counts TPU chips apart from GPUs; tasks here ask for GPUs only")
    cloud = "local" if local else choice.place.cloud or "any"
    region, zone = (None, None) if local else (choice.place.region, choice.place.zone)
    instance = r.instance_type or CHOSEN_AT_LAUNCH
    offer = Offer(cloud, region, zone, instance, shape, "on_demand", None, NO_PRICE)
    spot = group.market != "on_demand" and cloud not in NO_SPOT_CLOUDS
    return MachineType(offer, replace(offer, market="spot") if spot else None)


def scaled(group: NodeGroupSpec, choice: Choice, offers: Sequence[Offer], notes: Notes) -> MachineType | None:
    """A share (or a multiple) of the real machine that has the same accelerator and costs least for it.

    None when no offer has that accelerator.
    """
    ask, cpus = choice.ask, group.resources.cpus

    def share(o: Offer) -> float:
        return ask.count / o.shape.gpus if ask is not None else (cpus or o.shape.cpus) / o.shape.cpus

    def part_of(o: Offer) -> Offer:
        s, x = o.shape, share(o)
        shape = replace(s, gpus=s.gpus * x, cpus=max(1.0, s.cpus * x), memory_gib=s.memory_gib * x)
        return replace(o, shape=shape, price_usd_per_hour=(o.price_usd_per_hour or 0.0) * x)

    alike = [o for o in offers if (matches(ask, o.shape) if ask else o.shape.accelerator is None)]
    spots = {(o.cloud, o.region, o.instance_type): part_of(o) for o in alike if o.market == "spot"}
    parts = [
        (MachineType(part_of(o), spots.get((o.cloud, o.region, o.instance_type))), share(o))
        for o in alike
        if o.market == "on_demand"
    ]
    if not parts:
        return None
    best = best_first([m for m, _ in parts], group)[0]
    x = next(x for m, x in parts if m == best)
    o = best.any_offer
    notes.guesses.append(f"{group.name}: {text_of(ask)} is priced as {x:.4g} x {o.cloud} {o.instance_type}")
    return best


def pretend(best: MachineType, group: NodeGroupSpec, notes: Notes) -> MachineType:
    """The same machine as a local one: the declared CPUs and memory win over the real machine's."""
    o, r = best.any_offer, group.resources
    if o.price_usd_per_hour is None:
        return best
    shape = replace(o.shape, cpus=r.cpus or o.shape.cpus, memory_gib=r.memory_gib or o.shape.memory_gib)
    if not (r.cpus and r.memory_gib):
        notes.guesses.append(
            f"{group.name}: pretend nodes have {shape.cpus:g} vCPUs and {shape.memory_gib:g} GiB "
            f"(what is not declared is taken from {o.cloud} {o.instance_type})"
        )
    source = f"as if on {o.cloud} {o.region}: {o.source}"

    def local(offer: Offer | None) -> Offer | None:
        return offer and replace(offer, cloud="local", region=None, zone=None, shape=shape, source=source)

    return MachineType(local(best.on_demand), local(best.spot), best.rank)
