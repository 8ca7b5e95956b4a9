"""GPUs that a running task has lent while it is in a low phase, by the ids that its ranks know them by.

Ray counts a lent GPU as the lender's as long as the lender's placement group is there. A task that is placed on it
asks Ray for less, and its ranks are given the ids (see Place.lent). So that nobody else gets the same GPU from Ray,
the lender's group stays until the last borrower is gone, even where the lender has ended (Gangs.over).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from areal_sky.core.gangs import Placement
from areal_sky.core.taskevents import Place, Placed
from areal_sky.core.tasklife import TaskRecord
from areal_sky.run.nodebook import NodeBook


def may_lend(r: TaskRecord, gpu_ids: Mapping[int, tuple[str, ...]]) -> bool:
    """Whether the running task has whole GPUs of its own whose ids are known."""
    whole = r.bundle.gpus >= 1 and not any(p.lent for p in r.held)
    return whole and all(len(gpu_ids.get(rank, ())) == len(r.places[rank].devices) for rank in r.world)


def borrowers(r: TaskRecord, holding: Iterable[TaskRecord]) -> list[TaskRecord]:
    """Tasks that run on GPUs which this one has lent."""
    return [x for x in holding if any(p.lender == r.gang_id for p in x.held)]


def lent_devices(
    lenders: Iterable[tuple[TaskRecord, Mapping[int, tuple[str, ...]]]]
) -> dict[tuple[str, int], tuple[str, str]]:
    """(node, device) -> (id, lender's gang) of all that is lent. Devices of a rank and its ids are in one order."""
    found: dict[tuple[str, int], tuple[str, str]] = {}
    for r, gpu_ids in lenders:
        for rank in r.world:
            place = r.places[rank]
            devices = sorted(i for i, _ in place.devices)
            for device, gpu_id in zip(devices, gpu_ids.get(rank, ()), strict=False):
                found[place.node_id, device] = (gpu_id, r.gang_id)
    return found


def placed(
    r: TaskRecord, placement: Placement, lent: Mapping[tuple[str, int], tuple[str, str]], book: NodeBook
) -> Placed:
    """The placement as it is recorded. A driver itself runs where the first GPU of its claim is, and holds none."""
    found = _places(placement, lent, book)
    if r.spec.backends is None:
        return Placed(r.attempt + 1, found)
    return Placed(r.attempt + 1, (replace(found[0], devices=()),), found)


def _places(
    placement: Placement, lent: Mapping[tuple[str, int], tuple[str, str]], book: NodeBook
) -> tuple[Place, ...]:
    """The placement as it is recorded."""
    found: list[Place] = []
    for node_id, devices in zip(placement.node_ids, placement.devices, strict=True):
        borrowed = [lent[node_id, i] for i, _ in devices if (node_id, i) in lent]
        found.append(
            Place(
                node_id, *book.place_labels(node_id), devices, *book.node_size(node_id),
                tuple(gpu_id for gpu_id, _ in borrowed), borrowed[0][1] if borrowed else "",
            )
        )  # fmt: skip
    return tuple(found)
