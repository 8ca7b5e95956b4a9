"""What takes a round trip or more: submit, end, confirm, ask the clouds, find the way to the head. For a thread pool.

Each looks anew before it acts, so that repeating one after a crash does nothing twice.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from areal_sky.adapters.ports import LaunchRequest
from areal_sky.adapters.skypilot.board import Board, HeadSeat
from areal_sky.adapters.skypilot.judge import Ending, Launching, Stage
from areal_sky.adapters.skypilot.requests import DOWN, LAUNCH, Request, SkyApi
from areal_sky.errors import ArealSkyError, NotFound

log = logging.getLogger(__name__)
RETRY_S, RETRY_MAX_S = 5.0, 120.0  # between attempts to end a replica
FORGET_DOUBTS_S = 60.0  # doubts further apart than this are not of one cause

MakeTask = Callable[[LaunchRequest, str], Mapping[str, Any]]


class Acts:
    """`make_task(request, head_ip)` gives a replica's whole task."""

    def __init__(self, board: Board, api: SkyApi, make_task: MakeTask):
        self._board = board
        self._api = api
        self._make_task = make_task

    def submit(self, launch: Launching, head_ip: str) -> None:
        """Launches, unless a launch is in flight or the cluster is there: then that one is adopted."""
        try:
            request_id = self._submit(launch, head_ip)
        except ArealSkyError as e:
            with self._board.lock:
                launch.stage, launch.error = Stage.FAILED, self._board.hidden(e)
            return
        with self._board.lock:
            launch.request_id, launch.since_s = request_id, time.monotonic()
            launch.stage = Stage.FLYING if request_id else Stage.DONE
            launch.told = not request_id

    def _submit(self, launch: Launching, head_ip: str) -> str:
        assert launch.request is not None
        there = self._api.clusters([launch.name]).get(launch.name)
        if there is not None and not self._board.is_ours(there):
            raise self._board.not_ours(there)
        flying = [r.id for r in self._api.active() if r.cluster == launch.name and r.name == LAUNCH]
        if flying or there is not None:
            return flying[0] if flying else ""  # what it is worth, the next looks say
        return self._api.launch(self._make_task(launch.request, head_ip), launch.name)

    def end(self, ending: Ending) -> None:
        """Cancels a launch in flight, then `sky down`, unless one is under way or there is nothing of ours."""
        name = ending.name
        try:
            active = [r for r in self._api.active() if r.cluster == name]
            down = next((r.id for r in active if r.name == DOWN), "")
            there = self._api.clusters([name]).get(name)
            if there is not None and not self._board.is_ours(there):
                self._board.forget(name)
                return
            for request in active:
                if request.name == LAUNCH and not down:
                    self._api.cancel(request.id)
                    there = self._api.clusters([name]).get(name)
            if there is None and not down:
                self._board.forget(name)
                return
            down = down or self._api.down(name)
            with self._board.lock:
                ending.request_id, ending.stage = down, Stage.FLYING
        except ArealSkyError as e:
            self._end_failed(ending, e)

    def confirm_end(self, ending: Ending, request: Request | None) -> None:
        """After `sky down`: the replica is gone once SkyPilot lists it no more."""
        try:
            error = self._api.outcome(request) if request is not None else None
            there = self._api.clusters([ending.name]).get(ending.name)
            if there is None or not self._board.is_ours(there):
                self._board.forget(ending.name)
            else:
                self._end_failed(ending, error or NotFound("it ended, and the cluster is still listed"))
        except ArealSkyError as e:
            self._end_failed(ending, e)

    def _end_failed(self, ending: Ending, error: ArealSkyError) -> None:
        with self._board.lock:
            wait_s = min(RETRY_MAX_S, RETRY_S * 2.0**ending.tries)
            ending.tries += 1
            ending.retry_s = time.monotonic() + wait_s
            times = f"{ending.tries} times, last" if ending.tries > 1 else "once"
            ending.error = f"`sky down` has failed {times}: {self._board.hidden(error)}"
            ending.stage = Stage.FAILED
        log.warning("%s: %s; again in %.0f s", ending.name, ending.error, wait_s)

    def refresh(self, names: list[str]) -> None:
        """Asks the clouds, then whether the tasks of those that are up still run. Takes 3 s and more."""
        board = self._board
        try:
            found = board.ours(self._api.clusters(names, refresh=True))
            with board.lock:
                board.clusters = {n: c for n, c in board.clusters.items() if n not in names} | found
            for name in (n for n, c in found.items() if c.status == "UP"):
                self._check_task(name)
        finally:
            with board.lock:
                now_s = time.monotonic()
                for name in names:
                    again = now_s - board.refreshed_s.get(name, float("-inf")) < FORGET_DOUBTS_S
                    board.found_well[name] = min(3, board.found_well.get(name, 0) + 1) if again else 0
                    board.refreshed_s[name] = now_s

    def _check_task(self, name: str) -> None:
        try:
            why = self._api.job_failure(name)
        except NotFound:
            why = None  # its machines run, but SkyPilot was killed before it had set them up
        except ArealSkyError as e:
            log.warning("%s: %s", name, e)
            return
        with self._board.lock:
            launch = self._board.launches.setdefault(name, Launching(name, stage=Stage.DONE, told=True))
            if why == "":
                launch.stage = Stage.DONE if launch.stage is Stage.LOST else launch.stage
                return
            text = "its launch was interrupted before its task started" if why is None else why
            launch.broken = f"{text}; `sky logs {name}` says more"

    def seek_seat(self, private_ip: str) -> None:
        """Learns how ssh reaches the head."""
        try:
            config = self._api.ssh_config(self._board.head)
        except NotFound as e:
            log.info("%s", e)
            return
        with self._board.lock:
            self._board.seat = HeadSeat(self._board.head, private_ip, config)
