"""One controller process per cluster: started in the background, held by a lock, ended by the cluster's end."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from areal_sky.adapters import processes
from areal_sky.adapters.catalog import shipped_offers
from areal_sky.adapters.local import LocalCloud
from areal_sky.adapters.ports import Cloud
from areal_sky.core.events import ControllerStarted
from areal_sky.core.launch import plan
from areal_sky.core.masking import masked
from areal_sky.core.model import LaunchPlan
from areal_sky.core.offers import Known
from areal_sky.core.queueing import OrderPolicy
from areal_sky.core.reconcile import Patience
from areal_sky.core.scaling import Policy, hold
from areal_sky.errors import AlreadyExists, ArealSkyError, InvalidInput, Refused, StateError
from areal_sky.home import ClusterHome, locked
from areal_sky.run import modelfiles, offers
from areal_sky.run.clock import SystemClock
from areal_sky.run.controller import Controller
from areal_sky.run.headlink import HeadLink
from areal_sky.run.plugins import order_policy, scaling_policy
from areal_sky.run.usage import UsageKeeper
from areal_sky.spec import load_text
from areal_sky.spec.cluster import ClusterSpec, ScalingSpec, SchedulingSpec
from areal_sky.specfile import read_text

log = logging.getLogger(__name__)
TICK_S = 0.2
ASKED_S = 1.0  # how long a controller that starts waits for those who only ask whether one runs
# A pretend machine is there at once or not at all.
SKY_PATIENCE = Patience(vanish_s=60, join_s=600, lost_s=20, drain_s=600, backoff_s=15, backoff_max_s=600)
LOCAL_PATIENCE = Patience(vanish_s=10, join_s=120, lost_s=8, drain_s=120, backoff_s=2, backoff_max_s=60)


@dataclass(frozen=True)
class SpecSource:
    """The text that a cluster was brought up with, and what the command line said beside it.

    `text` has no secrets and is what is kept. `full` has them, in memory only: read from the file anew each time, empty
    when that has changed since; secrets then come from the environment, or are missing where they are needed.
    """

    path: str  # where it was read: relative paths in the text count from there
    text: str
    infra: str | None
    read_s: float = field(compare=False)  # deadlines are judged and counted from here, at every later reading too
    known: dict[str, Any] | None = field(default=None, compare=False)  # the offers planned with, for good
    models: dict[str, Any] = field(default_factory=dict[str, Any], compare=False)  # architectures read from files
    full: str = field(default="", compare=False, repr=False)

    @staticmethod
    def read(path: Path, infra: str | None) -> SpecSource:
        """Reads the file. Raises SpecError when it cannot be read."""
        full = read_text(path)
        return SpecSource(str(path.absolute()), masked(full), infra, time.time(), full=full)

    @staticmethod
    def saved(cluster: ClusterHome) -> SpecSource:
        """The source that the cluster has. Raises StateError."""
        try:
            source = SpecSource(**json.loads(cluster.spec_file.read_text()))
        except (OSError, ValueError, TypeError) as e:
            raise StateError(f"cannot read {cluster.spec_file}: {e}") from None
        return replace(source, full=_unmasked(source))

    def to_json(self) -> str:
        return json.dumps(asdict(replace(self, full="")), indent=1)

    def spec(self) -> ClusterSpec:
        """The spec that the text is. Raises SpecError."""
        spec = load_text(self.full or self.text, self.path, now_s=self.read_s)
        return spec if self.infra is None else spec.model_copy(update={"infra": self.infra})

    def with_offers(self) -> SpecSource:
        """The same, with what is on offer now and what the models' files say; asks SkyPilot's catalogs (seconds).

        Raises SpecError, InvalidInput.
        """
        spec = self.spec()
        read = modelfiles.architectures(spec, Path(self.path).parent)
        models = {name: asdict(a) for name, a in read.items()}
        return replace(self, known=offers.to_dict(offers.known_for(spec)), models=models)

    def load(self) -> tuple[ClusterSpec, LaunchPlan]:
        """The spec and its plan. Raises SpecError, Refused."""
        spec = self.spec()
        known = offers.from_dict(self.known) if self.known else Known(shipped_offers())
        if known.no_cloud:
            raise Refused(f"nothing can be launched: {known.no_cloud}; or add `--infra local`")
        return spec, plan(spec, known, {name: modelfiles.from_dict(a) for name, a in self.models.items()})


def _unmasked(source: SpecSource) -> str:
    try:
        full = read_text(Path(source.path))
    except ArealSkyError:
        return ""
    return full if masked(full) == source.text else ""


def load_plan(cluster: ClusterHome) -> tuple[ClusterSpec, LaunchPlan]:
    """The spec that the cluster was brought up with, and its plan. Raises SpecError, StateError."""
    return SpecSource.saved(cluster).load()


def check_reachable(spec: ClusterSpec) -> None:
    """Raises Refused where SkyPilot is needed and not installed. It is not imported: that takes seconds."""
    if not spec.is_local and find_spec("sky") is None:
        where = f"infra {spec.infra!r}" if spec.infra else "a spec without `infra`"
        raise Refused(f"{where} needs SkyPilot: pip install 'areal-sky[sky]', or add `--infra local`")


def local_cloud(cluster: ClusterHome, spec: ClusterSpec, launch: LaunchPlan) -> LocalCloud:
    """The machines of an `infra: local` cluster."""
    return LocalCloud(spec, launch, cluster.dir, cluster.tokens())


@contextmanager
def _open_cloud(cluster: ClusterHome, spec: ClusterSpec, launch: LaunchPlan) -> Iterator[Cloud]:
    """Where the cluster's machines come from, while the controller runs."""
    if spec.is_local:
        yield local_cloud(cluster, spec, launch)
        return
    from areal_sky.run.skyside import SkySide

    side = SkySide(cluster, spec, launch, Path(SpecSource.saved(cluster).path).parent, cluster.state())
    side.start()
    try:
        yield side.cloud
    finally:
        side.stop()


def run_controller(cluster: ClusterHome, stop: threading.Event) -> None:
    """Runs the cluster's controller until the cluster is down or `stop` is set; the cluster itself lives on.

    Raises AlreadyExists when another one runs, StateError, SpecError.
    """
    # Whoever asks `controller_runs` has the lock for a moment.
    with locked(cluster.dir / "controller.lock", wait_s=ASKED_S) as mine:
        if not mine:
            raise AlreadyExists(f"the controller of {cluster.name!r} already runs")
        spec, launch = load_plan(cluster)
        store = cluster.store()
        clock = SystemClock()
        look_s = 0.25 if spec.is_local else 0.5  # through a tunnel each look costs four processes something
        link = HeadLink(lambda: cluster.gateway("operate"), clock.now, look_s, on_view=UsageKeeper(cluster).beat)
        patience = LOCAL_PATIENCE if spec.is_local else SKY_PATIENCE
        try:
            with _open_cloud(cluster, spec, launch) as cloud:
                controller = Controller(
                    spec, launch, store, cloud, link, clock, _policy_or_hold(spec, cluster), patience
                )  # fmt: skip
                store.append(clock.now(), ControllerStarted(os.getpid()))
                link.start()
                _loop(controller, stop)
        finally:
            link.stop()
            store.close()


def start_controller(cluster: ClusterHome) -> None:
    """Starts the controller in the background unless one runs. Raises StateError when it does not come up."""
    if controller_runs(cluster):
        return
    env = {k: v for k, v in os.environ.items() if not k.startswith("AREAL_SKY_") or k == "AREAL_SKY_HOME"}
    argv = [sys.executable, "-m", "areal_sky.ui.cli.main", "controller", cluster.name]
    process = processes.spawn(argv, env, cluster.controller_log, cwd=Path("/"))
    until_s = time.monotonic() + 20.0
    while time.monotonic() < until_s:
        if controller_runs(cluster):
            return
        if process.poll() not in (None, 0):
            break
        time.sleep(0.02)
    raise StateError(f"the controller of {cluster.name!r} did not start; see {cluster.controller_log}")


def controller_runs(cluster: ClusterHome) -> bool:
    """Whether a live controller holds the cluster's lock."""
    with locked(cluster.dir / "controller.lock") as free:
        return not free


def load_policy(spec: ScalingSpec, source: SpecSource) -> Policy:
    """The scaling policy of a spec. Raises InvalidInput when it cannot be loaded."""
    return scaling_policy(spec, Path(source.path).parent)


def load_order(spec: SchedulingSpec, source: SpecSource) -> OrderPolicy:
    """The order of tasks that a spec names, as the head will load it. Raises InvalidInput when it cannot be loaded."""
    return order_policy(spec, Path(source.path).parent)


def _policy_or_hold(spec: ClusterSpec, cluster: ClusterHome) -> Policy:
    # `up` has checked it, but a file may be gone since; the cluster must be controlled, and ended, all the same.
    try:
        return load_policy(spec.scaling, SpecSource.saved(cluster))
    except InvalidInput as e:
        log.error("%s; until the controller is started again only a person scales", e)
        why = f"{e}; only a person scales now"
        return lambda context: hold(context, why)


def _loop(controller: Controller, stop: threading.Event) -> None:
    next_s = time.monotonic()
    while not stop.is_set() and not controller.done:
        try:
            controller.tick()
        except StateError as e:
            # Without a record there must be no action: wait for the disk, and say so.
            log.error("%s", e)
            stop.wait(2.0)
        except Exception:
            log.exception("tick failed; trying again")
            stop.wait(1.0)
        next_s = max(next_s + TICK_S, time.monotonic())
        stop.wait(next_s - time.monotonic())
