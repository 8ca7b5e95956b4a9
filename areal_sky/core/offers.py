"""Which machines would do for a group, and which of them is best. Used by `launch.plan`.

A MachineType is one machine type in one region with its price in each market; ranking compares these, never
single offers, so that the on-demand and spot price of a group always belong to the same hardware.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from areal_sky.core.model import NodeShape, Offer
from areal_sky.spec.accelerators import matching
from areal_sky.spec.cluster import AcceleratorAsk, NodeGroupSpec, ResourcesSpec

# SkyPilot reads a CPU ask without numbers as "8 or more vCPUs" (sky/clouds/utils, 0.14).
DEFAULT_CPUS = 8.0
# SkyPilot's optimizer matches accelerator counts to the catalog within this (sky/catalog/common.py, 0.14).
COUNT_TOLERANCE = 0.01

UNPRICED_CLOUDS = frozenset({"kubernetes", "slurm", "ssh"})
_ALIASES = {"k8s": "kubernetes", "lambda cloud": "lambda"}
NO_PRICE = "no price known"


@dataclass(slots=True)
class Notes:
    """What a plan says in words besides its numbers, gathered while it is made."""

    guesses: list[str]
    unknowns: list[str]


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of the market when a plan is made: the offers, what they leave open, and what speaks against them.

    `unknowns` and `refusals` are sentences for the plan to repeat. `no_cloud` says why nothing at all can be launched
    from here, which a plan may still price.
    """

    offers: tuple[Offer, ...]
    unknowns: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()
    no_cloud: str = ""


@dataclass(frozen=True, slots=True)
class Place:
    """A filter on where; None matches anything. `region` is the context on Kubernetes, the cluster on Slurm, where
    `zone` is the partition.
    """

    cloud: str | None = None
    region: str | None = None
    zone: str | None = None

    @staticmethod
    def parse(infra: str | None) -> Place:
        """Reads SkyPilot's infra string: `aws`, `aws/us-east-1`, `*/us-east-1`, `k8s/my/context`."""
        if not infra:
            return Place()
        cloud, _, rest = infra.partition("/")
        cloud = _ALIASES.get(cloud.lower(), cloud.lower())
        if cloud in ("kubernetes", "ssh"):  # a context's name may hold slashes
            return Place(cloud, rest or None)
        region, _, zone = rest.partition("/")
        return Place(*(None if x in ("", "*") else x for x in (cloud, region, zone)))

    def allows(self, cloud: str, region: str | None, zone: str | None = None) -> bool:
        """Whether a machine there would do. An offer for the whole region (no zone) holds in each of its zones."""
        return (
            self.cloud in (None, cloud.lower())
            and self.region in (None, region)
            and (self.zone is None or zone in (None, self.zone))
        )

    def __str__(self) -> str:
        return "/".join(x or "*" for x in (self.cloud, self.region, self.zone)).rstrip("/*") or "any cloud"


@dataclass(frozen=True, slots=True)
class MachineType:
    """One machine type in one region. `rank` is the place of its accelerator in an ordered ask, else 0."""

    on_demand: Offer | None
    spot: Offer | None
    rank: int = 0

    @property
    def any_offer(self) -> Offer:
        offer = self.on_demand or self.spot
        assert offer is not None
        return offer

    def without_dear_spot(self, max_frac: float | None) -> MachineType:
        """The same, its spot offer dropped if it costs more than that part of the on-demand price."""
        od, spot = self.on_demand, self.spot
        if max_frac is None or od is None or spot is None:
            return self
        if od.price_usd_per_hour is None or spot.price_usd_per_hour is None:
            return self
        return self if spot.price_usd_per_hour <= max_frac * od.price_usd_per_hour else replace(self, spot=None)


    def with_spot_partition(self, partition: str | None) -> MachineType:
        """On Slurm: the same, its spot being the partition of that name."""
        od = self.on_demand
        if partition is None or od is None or od.cloud != "slurm" or od.region is None:
            return self
        return replace(self, spot=replace(od, market="spot", zone=partition))


@dataclass(frozen=True, slots=True)
class Choice:
    """One accelerator (None: a CPU machine) in one place that would do."""

    ask: AcceleratorAsk | None
    place: Place
    rank: int = 0


def choices(resources: ResourcesSpec, infra: str | None) -> tuple[Choice, ...]:
    """Every (accelerator, place) pair that the resources allow, in the user's order."""
    home = resources.infra or infra
    pairs: list[tuple[AcceleratorAsk | None, Place]] = [
        (ask, Place.parse(ask.infra or home)) for ask in resources.accelerators
    ]
    if not pairs:
        pairs = [(None, place) for place in _entry_places(resources.raw)] or [(None, Place.parse(home))]
    return tuple(Choice(a, p, rank if resources.ordered else 0) for rank, (a, p) in enumerate(dict.fromkeys(pairs)))


def _entry_places(raw: Mapping[str, Any]) -> list[Place]:
    """Where the `any_of` or `ordered` entries of a CPU machine want it; empty without such entries."""
    places: list[Place] = []
    for key in ("any_of", "ordered"):
        entries = raw.get(key)
        for entry in cast("Sequence[Mapping[str, Any]]", entries if isinstance(entries, list | tuple) else ()):
            apart = "/".join(str(entry.get(k) or "*") for k in ("cloud", "region", "zone"))
            places.append(Place.parse(str(entry.get("infra") or apart)))
    return places


def machines(
    resources: ResourcesSpec,
    wanted: Sequence[Choice],
    offers: Iterable[Offer],
    *,
    minima: bool = True,
    capped: bool = True,
) -> tuple[MachineType, ...]:
    """The machines among `offers` that would do, each with its cheapest offer in each market.

    `minima` False drops the `cpus` and `memory` minima, `capped` False the cap `max_hourly_cost` on a node's price.
    """
    all_offers = tuple(offers)
    cap = hourly_cap(resources) if capped else None
    cpu_clouds = {o.cloud for o in all_offers if o.shape.accelerator is None}
    found: dict[tuple[str, str | None, str, int], MachineType] = {}
    for offer in all_offers:
        if cap is not None and (offer.price_usd_per_hour or 0.0) > cap:
            continue
        any_cpu = offer.cloud not in cpu_clouds  # a cloud of GPU machines only: SkyPilot takes the smallest of these
        rank = next((c.rank for c in wanted if _fits(offer, c, resources, minima, any_cpu)), None)
        if rank is None:
            continue
        key = (offer.cloud, offer.region, offer.instance_type, rank)
        known = found.get(key, MachineType(None, None, rank))
        if offer.market == "spot":
            found[key] = replace(known, spot=_cheaper(offer, known.spot))
        else:
            found[key] = replace(known, on_demand=_cheaper(offer, known.on_demand))
    return tuple(found.values())


def hourly_cap(resources: ResourcesSpec) -> float | None:
    """SkyPilot's `max_hourly_cost` of one node, dollars per hour, or None."""
    cap = resources.raw.get("max_hourly_cost")
    return float(cap) if isinstance(cap, int | float) else None


def _cheaper(one: Offer, other: Offer | None) -> Offer:
    def key(o: Offer) -> tuple[float, str]:
        return math.inf if o.price_usd_per_hour is None else o.price_usd_per_hour, o.zone or ""

    return one if other is None else min(one, other, key=key)


def _fits(offer: Offer, choice: Choice, resources: ResourcesSpec, minima: bool, any_cpu: bool) -> bool:
    if not choice.place.allows(offer.cloud, offer.region, offer.zone):
        return False
    if resources.instance_type and offer.instance_type != resources.instance_type:
        return False
    if minima and (offer.shape.cpus < (resources.cpus or 0) or offer.shape.memory_gib < (resources.memory_gib or 0)):
        return False
    if choice.ask is None:
        if resources.instance_type:
            return True
        cpus = resources.cpus or (DEFAULT_CPUS if minima else 0)
        return (any_cpu or offer.shape.accelerator is None) and offer.shape.cpus >= cpus
    return matches(choice.ask, offer.shape) and abs(offer.shape.gpus - choice.ask.count) <= COUNT_TOLERANCE


def matches(ask: AcceleratorAsk, shape: NodeShape) -> bool:
    """Is it an accelerator that was asked for, whatever the count?"""
    name = (shape.accelerator or "").lower()
    return any(name == n.lower() for n in matching(ask))


def cost(machine: MachineType, group: NodeGroupSpec) -> float:
    """Dollars per hour of the group at its largest on this machine; infinite without a price."""
    spot = price(machine.spot)
    on_demand = price(machine.on_demand)
    if group.market == "on_demand" or spot is None:
        spots = 0
    else:
        spots = group.max_replicas - (group.on_demand_base if group.market == "mixed" else 0)
    spots = max(0, min(spots, group.max_replicas))
    regular = group.max_replicas - spots
    if regular and on_demand is None:
        return math.inf
    return group.nodes_per_replica * (spots * (spot or 0.0) + regular * (on_demand or 0.0))


def best_first(found: Iterable[MachineType], group: NodeGroupSpec) -> list[MachineType]:
    """Listed order if the ask is ordered, then machines that have the market asked for, then the cheapest.

    Equal prices fall back to names, so that the result never depends on the order of the offers.
    """

    def key(m: MachineType) -> tuple[int, bool, float, str, str, str]:
        lacks_spot = group.market == "spot" and m.spot is None
        o = m.any_offer
        return (m.rank, lacks_spot, cost(m, group), o.cloud, o.region or "", o.instance_type)

    return sorted(found, key=key)


def price(offer: Offer | None) -> float | None:
    return None if offer is None else offer.price_usd_per_hour


def text_of(ask: AcceleratorAsk | None) -> str:
    """The ask as a user would write it; `CPU` for None."""
    if ask is None:
        return "CPU"
    if ask.name is not None:
        return f"{ask.name}:{ask.count:g}"
    return f"{ask.min_memory_gib or 0:g}GB{'' if ask.max_memory_gib else '+'}:{ask.count:g}"
