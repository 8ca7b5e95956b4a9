"""The devices of a node as one of few states, with the ways from each state to the next.

Nodes come to some hundreds of states, however many there are of them, while every start and every end leads from one
to another: each step is reckoned once and then only looked up.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from areal_sky.core.gangs import DeviceShare
from areal_sky.core.room import UNIT, Need, choose_devices

Bundles = tuple[tuple[DeviceShare, ...], ...]  # the devices of each of some bundles


class Devices:
    """So much is `free` of each device, in units; from `devices_of`.

    `total` is their sum, `whole` counts untouched ones, `partial` is the most that is free of one that is not. `most`:
    the largest thing that fits, in units: untouched devices together, or a part of one. `kind`: equal where only the
    numbers of the devices differ.
    """

    __slots__ = ("free", "kind", "most", "partial", "total", "whole")

    def __init__(self, free: tuple[int, ...]):
        self.free = free
        self.kind = tuple(sorted(free, reverse=True))
        self.total = sum(free)
        self.whole = sum([d >= UNIT for d in free])
        self.partial = max((d for d in free if d < UNIT), default=0)
        self.most = self.whole * UNIT or self.partial


class Taken:
    """What like bundles hold of the devices of one node: `amount` of each of theirs; from `taken_by`."""

    __slots__ = ("amount", "bundles", "count")

    def __init__(self, amount: int, bundles: Bundles):
        self.amount = amount
        self.bundles = bundles
        self.count = len(bundles)

    def add_to(self, devices: list[int], sign: int = 1) -> None:
        """Give it back (or, with -1, take it), but for devices that are not there."""
        amount = sign * self.amount
        for shares in self.bundles:
            for i, _ in shares:
                if i < len(devices):
                    devices[i] += amount


@lru_cache(maxsize=16384)
def devices_of(free: tuple[int, ...]) -> Devices:
    """One object for equal ones, mostly."""
    return Devices(free)


@lru_cache(maxsize=16384)
def _taken(amount: int, bundles: Bundles) -> Taken:
    return Taken(amount, bundles)


def taken_by(need: Need, bundles: Sequence[tuple[DeviceShare, ...]]) -> Taken:
    """One object for equal ones, mostly."""
    return _taken(need.amount, tuple(bundles))


@lru_cache(maxsize=65536)
def choose(devices: Devices, need: Need, count: int = 1) -> tuple[Taken, Devices] | None:
    """What so many bundles take of the devices, and what that leaves. None: too few are free."""
    bundles = choose_devices(devices.free, need, count)
    if bundles is None:
        return None
    taken = taken_by(need, bundles)
    return taken, without(devices, taken)


@lru_cache(maxsize=65536)
def without(devices: Devices, taken: Taken) -> Devices:
    """The devices once that is taken."""
    left = list(devices.free)
    taken.add_to(left, -1)
    return devices_of(tuple(left))


@lru_cache(maxsize=65536)
def given_back(devices: Devices, taken: Taken) -> Devices:
    """The devices once that is free again."""
    left = list(devices.free)
    taken.add_to(left)
    return devices_of(tuple(left))
