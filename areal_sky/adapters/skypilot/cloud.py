"""`ports.Cloud` over SkyPilot: a replica is a SkyPilot cluster. No method blocks: threads do what takes time.

One thread looks (at requests in flight twice a second while something moves, less often at SkyPilot's records: a launch
that ends is looked up at once); a pool of four acts. What exists is known from SkyPilot alone, never from a file: a
crash of ours at any point leaves nothing that is not found again by its name and label.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor

from areal_sky.adapters.ports import LaunchRequest
from areal_sky.adapters.skypilot.acts import Acts, MakeTask
from areal_sky.adapters.skypilot.board import Board, HeadSeat
from areal_sky.adapters.skypilot.judge import Ending, Launching, Stage
from areal_sky.adapters.skypilot.requests import Request, SkyApi
from areal_sky.core.model import Machine
from areal_sky.errors import ArealSkyError, Unreachable

log = logging.getLogger(__name__)
MAX_IN_FLIGHT = 4  # a local API server runs that many launches at a time (sky/server/config.py, 0.14)
# After a launch the server's worker tidies up. Who comes meanwhile gets a new worker, which takes 10 to 30 s to start.
WORKER_RESTS_S = 5.0
REQUESTS_S, REQUESTS_IDLE_S = 0.5, 2.0  # how often requests are looked at, while something moves and else
RECORDS_S, RECORDS_IDLE_S = 4.0, 6.0  # how often SkyPilot's records are read
REFRESH_S = 5.0  # the clouds themselves are asked about a doubted replica after 5 s, then after 10, 20, 40 s,
ROUTINE_REFRESH_S = 300.0  # and about one that nobody doubts this often
STALE_S = 30.0  # what was last seen counts no longer than this


class SkyCloud:
    """Serves one cluster. `start()` begins to look; until the first look `machines()` raises Unreachable."""

    def __init__(
        self,
        cluster: str,
        owner: str,
        make_task: MakeTask,
        launched: Mapping[str, str],
        groups: Collection[str],
        api: SkyApi | None = None,
        hide: Callable[[str], str] = str,
    ):
        """`launched` are request ids by replica, of a controller before this one. Others: see `Board` and `Acts`."""
        self._board = Board(cluster, owner, groups, hide)
        self._api = api or SkyApi()
        self._acts = Acts(self._board, self._api, make_task)
        for name, request_id in launched.items():
            stage = Stage.FLYING if request_id else Stage.LOST
            launch = Launching(name, stage=stage, request_id=request_id, told=True, since_s=time.monotonic())
            self._board.launches[name] = launch
        self._problem: ArealSkyError = Unreachable("SkyPilot has not been asked yet")
        self._seen_s = self._records_s = float("-inf")
        self._running: set[str] = set()  # acts of which one at a time is enough
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(max_workers=MAX_IN_FLIGHT, thread_name_prefix="skypilot")
        self._thread = threading.Thread(target=self._run, name="skypilot-look", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the threads; what the server has in flight goes on there."""
        self._stop.set()
        self._wake.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------ ports.Cloud

    def launch(self, request: LaunchRequest) -> str:
        """See `ports.Cloud`. "" until the server has it; groups wait here for the head's private address."""
        name = request.replica
        with self._board.lock:
            launch = self._board.launches.get(name)
            failed_before = launch is not None and launch.request is None and launch.stage is Stage.FAILED
            if (launch is None or failed_before) and name not in self._board.endings:
                self._board.begin(request)
                self._wake.set()
                return ""
            if launch is None or launch.stage in (Stage.WAITING, Stage.SUBMITTING):
                return ""
            if launch.stage is Stage.FAILED and not launch.request_id:
                del self._board.launches[name]
                raise launch.error or ArealSkyError("the launch failed")
            launch.told = True
            return launch.request_id

    def machines(self) -> tuple[Machine, ...]:
        """See `ports.Cloud`. Raises Unreachable while SkyPilot does not answer."""
        if time.monotonic() - self._seen_s > STALE_S:
            raise self._problem
        return self._board.machines()

    def terminate(self, replica: str) -> None:
        """See `ports.Cloud`. Cancels a launch in flight, then `sky down`; a failed try is repeated with backoff."""
        with self._board.lock:
            launch = self._board.launches.get(replica)
            if launch is not None and launch.stage is Stage.SUBMITTING:
                return  # asked again in a second, when it is known what was submitted
            if launch is not None and launch.stage is Stage.WAITING:
                self._board.forget(replica)
                return
            ending = self._board.endings.setdefault(replica, Ending(replica))
            if ending.stage is not Stage.WAITING and not (
                ending.stage is Stage.FAILED and time.monotonic() >= ending.retry_s
            ):
                return
            ending.stage = Stage.SUBMITTING
        self._do(self._acts.end, ending)

    def doubt(self, replica: str) -> None:
        """See `ports.Cloud`. Asks the cloud itself soon, and whether the replica's task still runs."""
        with self._board.lock:
            board = self._board
            wait_s = REFRESH_S * 2.0 ** board.found_well.get(replica, 0)
            due = time.monotonic() - board.refreshed_s.get(replica, float("-inf")) > wait_s
            if due and replica not in board.doubts:
                board.doubts.add(replica)
                self._wake.set()

    def head_seat(self) -> HeadSeat | None:
        """How to reach the head's machine, once it is up."""
        with self._board.lock:
            return self._board.seat

    # ------------------------------------------------------------ looking

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._look()
                self._submit_waiting()
                self._refresh_if_due()
                self._find_seat()
            except ArealSkyError as e:
                log.warning("SkyPilot: %s", e)
                self._problem, self._seen_s, self._records_s = e, float("-inf"), float("-inf")
            except Exception:
                log.exception("looking at SkyPilot failed; trying again")
            self._wake.wait(REQUESTS_S if self._board.moving() else REQUESTS_IDLE_S)
            self._wake.clear()

    def _look(self) -> None:
        board = self._board
        now_s = time.monotonic()
        if now_s - self._records_s > (RECORDS_S if board.moving() else RECORDS_IDLE_S):
            # First, since it alone notices that a local server is gone: `active` would then say that nothing flies.
            board.see_clusters(self._api.clusters(), now_s)
            self._records_s = now_s
        active = self._api.active()
        board.see_requests(active)
        with board.lock:
            launches = [x for x in board.launches.values() if x.stage in (Stage.FLYING, Stage.LOST)]
            endings = [x for x in board.endings.values() if x.stage is Stage.FLYING]
        known = {r.id: r for r in active}
        known |= self._api.lookup({x.request_id for x in (*launches, *endings)} - {"", *known})
        for launch in launches:
            self._follow_launch(launch, known.get(launch.request_id))
        for ending in endings:
            request = known.get(ending.request_id)
            if request is None or not request.active:
                ending.stage = Stage.SUBMITTING
                self._do(self._acts.confirm_end, ending, request)
        self._seen_s = time.monotonic()

    def _follow_launch(self, launch: Launching, request: Request | None) -> None:
        board = self._board
        if request is None:
            if launch.stage is Stage.FLYING:
                launch.stage, launch.since_s = Stage.LOST, time.monotonic()
            record = board.clusters.get(launch.name)
            if record is not None and record.status == "UP":
                self.doubt(launch.name)  # was its task ever started?
            return
        if request.active:
            launch.stage = Stage.FLYING
            return
        error = self._api.outcome(request)
        found = self._api.clusters([launch.name])  # the record says UP only now
        with board.lock:
            board.clusters |= board.ours(found)
            error = next((board.not_ours(c) for c in found.values() if not board.is_ours(c)), error)
            board.flying.pop(launch.name, None)
            launch.error = None if error is None else board.hidden(error)
            launch.stage = Stage.DONE if error is None else Stage.FAILED
            launch.ended_s = time.monotonic()

    # ------------------------------------------------------------ setting to work

    def _submit_waiting(self) -> None:
        board = self._board
        head_ip = board.head_ip()
        with board.lock:
            rested_s = time.monotonic() - WORKER_RESTS_S
            busy = sum(
                x.stage in (Stage.SUBMITTING, Stage.FLYING) or x.ended_s > rested_s for x in board.launches.values()
            )
            waiting = [x for x in board.launches.values() if x.stage is Stage.WAITING]
            ready = [x for x in waiting if x.name == board.head or head_ip]
            # The head is what all wait for; then what takes longest.
            ready.sort(key=lambda x: (x.name != board.head, -x.request.plan.nodes_per_replica if x.request else 0))
            chosen = ready[: max(0, MAX_IN_FLIGHT - busy)]
            for launch in chosen:
                launch.stage = Stage.SUBMITTING
        for launch in chosen:
            self._do(self._acts.submit, launch, head_ip)

    def _refresh_if_due(self) -> None:
        board, now_s = self._board, time.monotonic()
        with board.lock:
            due = {n for n in board.clusters if now_s - board.refreshed_s.setdefault(n, now_s) > ROUTINE_REFRESH_S}
            names = sorted(n for n in board.doubts | due if board.settled(n))
            if names and self._once(self._acts.refresh, names):
                board.doubts.clear()

    def _find_seat(self) -> None:
        board = self._board
        ip = board.head_ip()
        with board.lock:
            if board.seat is not None and board.seat.private_ip != ip:
                board.seat = None
            if ip and board.seat is None and board.head not in board.endings:
                self._once(self._acts.seek_seat, ip)

    def _once(self, work: Callable[..., None], *arguments: object) -> bool:
        """In the pool, unless it is at work already."""
        if work.__name__ in self._running:
            return False
        self._running.add(work.__name__)
        self._do(work, *arguments)
        return True

    def _do(self, work: Callable[..., None], *arguments: object) -> None:
        def safely() -> None:
            try:
                work(*arguments)
            except ArealSkyError as e:
                log.warning("%s: %s", work.__name__, e)
            except Exception:
                log.exception("%s failed", work.__name__)
            finally:
                self._running.discard(work.__name__)
                self._wake.set()

        if not self._stop.is_set():
            self._pool.submit(safely)
