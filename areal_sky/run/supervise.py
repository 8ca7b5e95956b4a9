"""One controller process per cluster: started in the background, held by a lock, ended by the cluster's end."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from areal_sky.adapters import processes
from areal_sky.adapters.catalog import shipped_offers
from areal_sky.adapters.local import LocalCloud
from areal_sky.core.events import ControllerStarted
from areal_sky.core.launch import plan
from areal_sky.core.model import LaunchPlan
from areal_sky.core.reconcile import Patience
from areal_sky.core.scaling import Policy, hold
from areal_sky.errors import AlreadyExists, InvalidInput, Refused, StateError
from areal_sky.home import ClusterHome, locked
from areal_sky.run.clock import SystemClock
from areal_sky.run.controller import Controller
from areal_sky.run.headlink import HeadLink
from areal_sky.run.plugins import scaling_policy
from areal_sky.spec import load_text
from areal_sky.spec.cluster import ClusterSpec, ScalingSpec
from areal_sky.specfile import read_text

log = logging.getLogger(__name__)
TICK_S = 0.2
# A pretend machine is there at once or not at all.
LOCAL_PATIENCE = Patience(vanish_s=10, join_s=120, lost_s=8, drain_s=120, backoff_s=2, backoff_max_s=60)


@dataclass(frozen=True)
class SpecSource:
    """The text that a cluster was brought up with, and what the command line said beside it."""

    path: str  # where it was read: relative paths in the text count from there
    text: str
    infra: str | None
    read_s: float = field(compare=False)  # deadlines are judged and counted from here, at every later reading too

    @staticmethod
    def read(path: Path, infra: str | None) -> SpecSource:
        """Reads the file. Raises SpecError when it cannot be read."""
        return SpecSource(str(path.absolute()), read_text(path), infra, time.time())

    @staticmethod
    def saved(cluster: ClusterHome) -> SpecSource:
        """The source that the cluster has. Raises StateError."""
        try:
            return SpecSource(**json.loads(cluster.spec_file.read_text()))
        except (OSError, ValueError, TypeError) as e:
            raise StateError(f"cannot read {cluster.spec_file}: {e}") from None

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    def load(self) -> tuple[ClusterSpec, LaunchPlan]:
        """The spec and its plan. Raises SpecError, Refused."""
        spec = load_text(self.text, self.path, now_s=self.read_s)
        if self.infra is not None:
            spec = spec.model_copy(update={"infra": self.infra})
        return spec, plan(spec, shipped_offers())


def load_plan(cluster: ClusterHome) -> tuple[ClusterSpec, LaunchPlan]:
    """The spec that the cluster was brought up with, and its plan. Raises SpecError, StateError."""
    return SpecSource.saved(cluster).load()


def check_reachable(spec: ClusterSpec) -> None:
    """Raises Refused for an infra that `up` cannot reach."""
    if not spec.is_local:
        where = f"infra {spec.infra!r}" if spec.infra else "a spec without `infra`"
        raise Refused(
            f"`up` brings clusters up on this machine so far, not {where}: add `--infra local`, or let "
            "`areal-sky render` write the task YAMLs that `sky launch` takes"
        )


def cloud_for(cluster: ClusterHome, spec: ClusterSpec, launch: LaunchPlan) -> LocalCloud:
    """Where the cluster's machines come from. Raises Refused."""
    check_reachable(spec)
    return LocalCloud(spec, launch, cluster.dir, cluster.tokens())


def run_controller(cluster: ClusterHome, stop: threading.Event) -> None:
    """Runs the cluster's controller until the cluster is down or `stop` is set; the cluster itself lives on.

    Raises AlreadyExists when another one runs, StateError, SpecError.
    """
    with locked(cluster.dir / "controller.lock") as mine:
        if not mine:
            raise AlreadyExists(f"the controller of {cluster.name!r} already runs")
        spec, launch = load_plan(cluster)
        store = cluster.store()
        clock = SystemClock()
        link = HeadLink(lambda: cluster.gateway("operate"), clock.now)
        controller = Controller(
            spec, launch, store, cloud_for(cluster, spec, launch), link, clock,
            _policy_or_hold(spec, cluster), LOCAL_PATIENCE,
        )  # fmt: skip
        store.append(clock.now(), ControllerStarted(os.getpid()))
        link.start()
        try:
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
