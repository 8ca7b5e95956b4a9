"""Hidden commands: what runs in the background on the user's machine (controller) and on the nodes (head, node)."""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from areal_sky.adapters.processes import listening, settle, stop_on_signals
from areal_sky.errors import ArealSkyError

if TYPE_CHECKING:
    from areal_sky.run.head import Head
    from areal_sky.run.tasks import TaskService

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@click.command(hidden=True)
@click.argument("name")
def controller(name: str) -> None:
    """Run the controller of cluster NAME until the cluster is down."""
    from areal_sky.home import choose_cluster
    from areal_sky.run.supervise import run_controller

    set_up_logging()
    stop = threading.Event()
    stop_on_signals(stop)
    run_controller(choose_cluster(name), stop)


@click.command(hidden=True)
def node() -> None:
    """Join this machine to a cluster and hold its lease. Configured by the environment."""
    from areal_sky.run.node import run_node
    from areal_sky.ui.nodepage import serve_metrics

    set_up_logging()
    stop = threading.Event()
    stop_on_signals(stop)
    sys.exit(run_node(os.environ, stop, serve_metrics))


@click.command(hidden=True)
def head() -> None:
    """Start the cluster's Ray head and serve its gateway. Configured by the environment."""
    from areal_sky.run.head import Head
    from areal_sky.run.node import fail_for_good

    set_up_logging()
    head = Head(os.environ)
    try:
        head.start_ray()
    except ArealSkyError as e:
        logging.error("%s", e)
        sys.exit(fail_for_good(os.environ.get("AREAL_SKY_NODE_DIR", ""), str(e)))
    sys.exit(_serve(head))


def set_up_logging(level: int = logging.INFO) -> None:
    """Logs to stderr, without a line per HTTP request."""
    logging.basicConfig(level=level, format=LOG_FORMAT, stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)


def _serve(head: Head) -> int:
    # Imported after Ray's daemon has been started: its boot and these imports overlap.
    import uvicorn

    from areal_sky.adapters.notices import Notices
    from areal_sky.adapters.raycluster import RayClusterAdapter
    from areal_sky.adapters.windowstore import WindowStore
    from areal_sky.run.alertstore import AlertStore
    from areal_sky.run.clock import SystemClock
    from areal_sky.run.hub import TelemetryHub
    from areal_sky.run.journal import Journal
    from areal_sky.run.runner import Runner, runner_arguments
    from areal_sky.run.tasks import TaskService
    from areal_sky.run.watch import Watch
    from areal_sky.ui.gateway import create_app

    stop = threading.Event()
    stop_on_signals(stop)
    journal = Journal(head.state_dir / "journal.db")
    store = WindowStore(head.state_dir / "windows.db")
    hub = TelemetryHub(head.env.groups, lease_s=head.env.lease_s, store=store)

    def connect() -> TaskService:
        ray = RayClusterAdapter(head.ray_address, head.tokens.get("ray", ""), Runner, runner_arguments, head.ray_tmp)
        service = TaskService(ray, journal, SystemClock(), head.env, hub, steady=time.monotonic)
        stop_on_signals(stop)  # again: Ray has put its own handlers in place
        notices = Notices(head.env.webhook, head.env.alert_command, os.environ)
        watch = Watch(service, AlertStore(head.state_dir / "alerts.db"), head.env, notices)
        threading.Thread(target=watch.run, args=(stop,), name="watch", daemon=True).start()
        app = create_app(
            service, hub, head.tokens, head.env.cluster, on_controller=lambda _: head.controller_seen(), watch=watch
        )
        config = uvicorn.Config(app, ws="none", log_level="warning", access_log=False)
        sockets = [listening(host, head.env.gateway_port) for host in head.bind_hosts]
        threading.Thread(target=_served(uvicorn.Server(config), sockets, stop), name="gateway", daemon=True).start()
        head.announce()
        settle()
        return service

    try:
        return head.loop(connect, stop)
    finally:
        hub.close()


def _served(server: Any, sockets: list[socket.socket], stop: threading.Event) -> Callable[[], None]:
    def run() -> None:
        try:
            server.run(sockets=sockets)
        finally:
            # Without a gateway this process is of no use: let the next one try.
            logging.error("the gateway has ended")
            stop.set()

    return run
