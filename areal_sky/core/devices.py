"""The devices of a node as one of few states, with the ways from each state to the next.

Nodes come to some hundreds of states, however many there are of them, while every start and every end leads from one
to another: each step is reckoned once and then only looked up.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TypeVar

from areal_sky.core.gangs import DeviceShare
from areal_sky.core.room import UNIT, Need, choose_devices

Bundles = tuple[tuple[DeviceShare, ...], ...]  # the devices of each of some bundles
MOST_STATES = 4096  # bounds on what is remembered: where there is more, it is reckoned anew
MOST_STEPS = 512
K = TypeVar("K")
V = TypeVar("V")


class Taken:
    """What like bundles hold of one node, in units: `amount` of each of their devices. From `taken_by`."""

    __slots__ = ("amount", "bundles", "cpus", "memory")

    def __init__(self, need: Need, bundles: Bundles):
        self.amount = need.amount
        self.bundles = bundles
        self.cpus = len(bundles) * need.cpus
        self.memory = len(bundles) * need.memory

    def add_to(self, devices: list[int], sign: int = 1) -> None:
        """Give the devices back (or, with -1, take them), but for those that are not there."""
        amount = sign * self.amount
        for shares in self.bundles:
            for i, _ in shares:
                if i < len(devices):
                    devices[i] += amount


class Devices:
    """So much is `free` of each device, in units. From `devices_of`.

    `total` is their sum, `whole` counts untouched ones, `partial` is the most that is free of one that is not. `most`:
    the largest thing that fits, in units: untouched devices together, or a part of one. `kind`: equal where only the
    numbers of the devices differ.
    """

    __slots__ = ("chosen", "free", "kind", "less", "more", "most", "partial", "total", "whole")

    def __init__(self, free: tuple[int, ...]):
        self.free = free
        self.kind = tuple(sorted(free, reverse=True))
        self.total = sum(free)
        self.whole = sum([d >= UNIT for d in free])
        self.partial = max((d for d in free if d < UNIT), default=0)
        self.most = self.whole * UNIT or self.partial
        # The steps that are known.
        self.chosen: dict[Need | tuple[Need, int], tuple[Taken, Devices]] = {}
        self.less: dict[Taken, Devices] = {}
        self.more: dict[Taken, Devices] = {}

    def choose(self, need: Need, count: int = 1) -> tuple[Taken, Devices]:
        """What so many bundles take, and what that leaves. They do fit."""
        key = need if count == 1 else (need, count)
        found = self.chosen.get(key)
        if found is None:
            bundles = choose_devices(self.free, need, count)
            assert bundles is not None, "asked for where it does not fit"
            taken = taken_by(need, bundles)
            found = (taken, self.without(taken))
            _remember(self.chosen, key, found)
        return found

    def without(self, taken: Taken) -> Devices:
        """What is free once that is taken."""
        return self.less.get(taken) or self._step(self.less, taken, -1)

    def given(self, taken: Taken) -> Devices:
        """What is free once that is given back."""
        return self.more.get(taken) or self._step(self.more, taken, 1)

    def forget(self) -> None:
        """All steps from here: they hold other states."""
        for steps in (self.chosen, self.less, self.more):
            steps.clear()

    def _step(self, steps: dict[Taken, Devices], taken: Taken, sign: int) -> Devices:
        devices = list(self.free)
        taken.add_to(devices, sign)
        found = devices_of(tuple(devices))
        _remember(steps, taken, found)
        return found


_states: dict[tuple[int, ...], Devices] = {}


def devices_of(free: tuple[int, ...]) -> Devices:
    """One object for equal ones, as a rule."""
    found = _states.get(free)
    if found is None:
        if len(_states) >= MOST_STATES:
            for state in list(_states.values()):
                state.forget()
            _states.clear()
        found = _states[free] = Devices(free)
    return found


@lru_cache(maxsize=16384)
def _taken(need: Need, bundles: Bundles) -> Taken:
    return Taken(need, bundles)


def taken_by(need: Need, bundles: Sequence[tuple[DeviceShare, ...]]) -> Taken:
    """One object for equal ones, as a rule."""
    return _taken(need, tuple(bundles))


def _remember(steps: dict[K, V], key: K, value: V) -> None:
    if len(steps) >= MOST_STEPS:
        steps.clear()
    steps[key] = value
