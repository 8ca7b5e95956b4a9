"""What can be had for one spec, and at what price: from SkyPilot where it is set up, else from the shipped table."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from areal_sky.adapters.catalog import shipped_offers
from areal_sky.adapters.skypilot import offers as skypilot
from areal_sky.core.model import HEAD_GROUP, NodeShape, Offer
from areal_sky.core.offers import Known, text_of
from areal_sky.errors import StateError, Unreachable
from areal_sky.spec.cluster import ClusterSpec, ResourcesSpec

OFFLINE_DEADLINE_S = 60.0  # 2 to 4 s on a machine at rest, most of it SkyPilot's import
ONLINE_DEADLINE_S = 60.0  # may fetch catalogs first
SHIPPED = "prices are from a small table shipped with areal_sky; what else there is, and what you may use, is not known"


def offers_for(spec: ClusterSpec) -> tuple[tuple[Offer, ...], tuple[str, ...]]:
    """The offers for a spec, and in words what they leave open. See `known_for`."""
    known = known_for(spec)
    return known.offers, known.unknowns


def known_for(spec: ClusterSpec, *, offline: bool = False, sky: bool = True) -> Known:
    """Everything known about what the groups of a spec could run on.

    Asks SkyPilot's catalogs (2 to 4 s) when it is installed and somebody has run `sky check`; otherwise, for
    `infra: local` and with `sky` False it is the shipped price table (no wait). `offline` uses no network.
    Never raises for what SkyPilot does, never takes longer than the two deadlines.
    """
    table = shipped_offers()
    if spec.is_local:
        return Known(table)  # nothing will be rented: the table prices what is pretended
    if not sky:
        return Known(table, (f"SkyPilot was not asked; {SHIPPED}",))
    if not skypilot.installed():
        return _no_cloud(table, "SkyPilot is not installed: pip install 'areal-sky[sky]'")
    if not skypilot.ever_checked():
        return _no_cloud(table, "no cloud is enabled: `sky check` was never run here")
    try:
        answer = _ask(spec, offline)
    except Unreachable as e:
        return Known(table, (f"{e}; {SHIPPED}",))
    if not answer.clouds:
        return _no_cloud(table, "no cloud is enabled: `sky check` says why")
    failed = tuple(f"{cloud} is enabled but could not be looked at: {why}" for cloud, why in answer.failed.items())
    return Known(answer.offers, failed, tuple(_refusals(spec, answer)))


def _no_cloud(table: tuple[Offer, ...], why: str) -> Known:
    return Known(table, (f"{why}; {SHIPPED}",), no_cloud=why)


def _ask(spec: ClusterSpec, offline: bool) -> skypilot.Answer:
    """The answer from fresh catalogs; where that takes too long, from those on this machine. Raises Unreachable."""
    asks = [_group_ask(HEAD_GROUP, spec.head, spec, 1)]
    asks += [_group_ask(g.name, g.resources, spec, g.nodes_per_replica) for g in spec.groups]
    if not offline:
        try:
            return skypilot.ask(asks, deadline_s=ONLINE_DEADLINE_S)
        except Unreachable:
            pass
    return skypilot.ask(asks, offline=True, deadline_s=OFFLINE_DEADLINE_S)


def _group_ask(name: str, resources: ResourcesSpec, spec: ClusterSpec, nodes: int) -> skypilot.Ask:
    return skypilot.Ask(name, resources.raw, resources.infra or spec.infra, nodes)


def _refusals(spec: ClusterSpec, answer: skypilot.Answer) -> list[str]:
    """Why a group can be had nowhere: SkyPilot looked at every cloud it may use, and found nothing."""
    lines: list[str] = []
    clouds = ", ".join(answer.clouds)
    for name, resources in [(HEAD_GROUP, spec.head), *((g.name, g.resources) for g in spec.groups)]:
        said = answer.groups[name]
        if said.wrong:
            lines.append(f"{name}: SkyPilot cannot use its resources: {said.wrong}")
            continue
        if said.offers or set(answer.failed) & set(said.asked):
            continue
        if said.not_enabled and not said.asked:
            first, places = said.not_enabled[0], " and ".join(said.not_enabled)
            lines.append(f"{name}: {places} is not enabled (`sky check {first}` says why), only {clouds}")
            continue
        asked = " or ".join(text_of(a) for a in resources.accelerators)
        what = asked or resources.instance_type or _cpu_text(resources)
        where = ", ".join(said.asked)
        near = f"; there is {', '.join(said.near[:6])}" if said.near else ""
        hints = "".join(f"; {cloud}: {hint}" for cloud, hint in said.hints.items())
        lines.append(f"{name}: no machine with {what} on {where}{near}{hints}")
    return lines


def _cpu_text(resources: ResourcesSpec) -> str:
    parts = [(resources.cpus, "CPUs"), (resources.memory_gib, "GiB")]
    return " and ".join(f"{n:g} {unit}" for n, unit in parts if n) or "CPUs"


# ---------------------------------------------------------------- kept with a cluster


def to_dict(known: Known) -> dict[str, Any]:
    """JSON values, for keeping beside a cluster: what it was planned with must not change under it."""
    return asdict(known)


def from_dict(raw: dict[str, Any]) -> Known:
    """What `to_dict` gave. Raises StateError."""
    try:
        return Known(tuple(map(_offer, raw["offers"])), tuple(raw["unknowns"]), tuple(raw["refusals"]), raw["no_cloud"])
    except (TypeError, KeyError) as e:
        raise StateError(f"saved offers cannot be read: {e}") from None


def _offer(raw: dict[str, Any]) -> Offer:
    return Offer(**{**raw, "shape": NodeShape(**raw["shape"])})
