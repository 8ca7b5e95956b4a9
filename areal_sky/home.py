"""The state folder: one directory per cluster under `~/.areal_sky` (`AREAL_SKY_HOME` moves it), yours alone to read."""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Literal

from areal_sky.errors import InvalidInput, NotFound, StateError, Unreachable

if TYPE_CHECKING:
    from areal_sky.adapters.gateway_client import GatewayClient
    from areal_sky.adapters.store import EventStore
    from areal_sky.core.events import Record
    from areal_sky.core.model import ClusterState

Right = Literal["read", "submit", "operate"]
NAME = re.compile(r"[a-z][a-z0-9-]{0,25}")
TOKEN_NAMES = ("read", "submit", "operate", "node", "ray")


def home() -> Path:
    """The root of all state."""
    return Path(os.environ.get("AREAL_SKY_HOME") or Path.home() / ".areal_sky").absolute()


class ClusterHome:
    """The files of one cluster. Nothing is created before `create()`."""

    def __init__(self, name: str, folder: Path | None = None):
        """`folder` is where the state lies, the usual place by default.

        Raises InvalidInput for a name that no cluster can have.
        """
        if not NAME.fullmatch(name):
            raise InvalidInput(f"{name!r} is no cluster name: 1 to 26 of a-z, 0-9 and '-', starting with a letter")
        self.name = name
        self.dir = folder or home() / "clusters" / name
        self.events_db = self.dir / "events.db"
        self.spec_file = self.dir / "spec.json"
        self.tokens_file = self.dir / "tokens.json"
        self.head_dir = self.dir / "head"
        self.nodes_dir = self.dir / "nodes"
        self.controller_log = self.dir / "controller.log"

    def exists(self) -> bool:
        return self.events_db.exists()

    def create(self, spec_source: str) -> None:
        """Makes the folder with the spec and fresh tokens; keeps tokens that are there. Raises StateError."""
        with _as_state_error(self.dir):
            for folder in (home(), home() / "clusters", self.dir, self.head_dir, self.nodes_dir):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self.tokens_file.exists():
                tokens = {name: secrets.token_hex(32) for name in TOKEN_NAMES}
                write_private(self.tokens_file, json.dumps(tokens))
            write_private(self.spec_file, spec_source)

    def archive(self, now_s: float) -> None:
        """Moves the state of a cluster that is down out of the way of a new one of its name."""
        when = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now_s))
        with _as_state_error(self.dir):
            target = home() / "archive" / f"{self.name}-{when}"
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.dir.rename(target)

    def tokens(self) -> dict[str, str]:
        """Token by right. Raises NotFound, StateError."""
        try:
            return json.loads(self.tokens_file.read_text())
        except FileNotFoundError:
            raise NotFound(f"no cluster {self.name!r} under {home()}") from None
        except (OSError, ValueError) as e:
            raise StateError(f"cannot read {self.tokens_file}: {e}") from None

    def store(self) -> EventStore:
        """The cluster's events. Raises NotFound when there is no such cluster, StateError."""
        from areal_sky.adapters.store import EventStore

        if not self.exists():
            raise NotFound(f"no cluster {self.name!r} under {home()}")
        return EventStore(self.events_db)

    def records(self, after_seq: int = 0) -> list[Record]:
        """All events after that number, in order. Raises NotFound, StateError."""
        store = self.store()
        try:
            return store.read(after_seq)
        finally:
            store.close()

    def state(self) -> ClusterState:
        """The fold of all events so far. Raises NotFound, StateError."""
        from areal_sky.core.events import fold

        return fold(self.records())

    def address(self) -> dict[str, str | int]:
        """Where the head listens. Raises Unreachable while it has not told."""
        try:
            return json.loads((self.head_dir / "address.json").read_text())
        except (OSError, ValueError):
            raise Unreachable(self._no_head()) from None

    def _no_head(self) -> str:
        try:
            return f"no way to the head of {self.name!r} yet: {(self.head_dir / 'tunnel.problem').read_text()}"
        except OSError:
            return f"the head of {self.name!r} is not up (see `areal-sky status {self.name}`)"

    def gateway(self, right: Right = "read") -> GatewayClient:
        """A client of the head with that right. Raises NotFound, Unreachable."""
        from areal_sky.adapters.gateway_client import GatewayClient

        token = self.tokens()[right]
        return GatewayClient(str(self.address()["gateway_url"]), token)


def clusters() -> list[ClusterHome]:
    """Every cluster that has state here, by name."""
    folder = home() / "clusters"
    try:
        names = sorted(p.name for p in folder.iterdir() if NAME.fullmatch(p.name))
    except FileNotFoundError:
        return []
    except OSError as e:
        raise StateError(f"cannot read {folder}: {e}") from None
    return [c for c in map(ClusterHome, names) if c.exists()]


def past_clusters() -> list[ClusterHome]:
    """Clusters that went down and whose name was used again since, by name, oldest first. Only for reading."""
    folder = home() / "archive"
    found = sorted(folder.glob("*-*Z")) if folder.is_dir() else []
    past = [(p.name.rpartition("-")[0], p) for p in found]
    return [c for c in (ClusterHome(name, p) for name, p in past if NAME.fullmatch(name)) if c.exists()]


def choose_cluster(name: str | None) -> ClusterHome:
    """The named cluster, or the only one that is not down. Raises NotFound, and InvalidInput when several are up."""
    if name is not None:
        chosen = ClusterHome(name)
        if not chosen.exists():
            known = ", ".join(c.name for c in clusters()) or "none"
            raise NotFound(f"no cluster {name!r} (known: {known})")
        return chosen
    live = [c for c in clusters() if _is_live(c)]
    if len(live) == 1:
        return live[0]
    if not live:
        raise NotFound("no cluster is up: `areal-sky up FILE` brings one up")
    raise InvalidInput(f"several clusters are up: name one with -c ({', '.join(c.name for c in live)})")


def _is_live(cluster: ClusterHome) -> bool:
    try:
        return cluster.state().down_s is None
    except StateError:
        return False  # one damaged cluster must not stand in the way of the others; `status` shows it


def write_private(path: Path, text: str) -> None:
    """Replaces the file in one step, readable by its owner alone."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    temporary.replace(path)


@contextmanager
def locked(path: Path, wait_s: float = 0.0) -> Iterator[bool]:
    """Holds a lock file while the body runs; yields False when another process still has it after `wait_s`."""
    with _as_state_error(path):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = path.open("a")
    with file:
        yield _flock(file, time.monotonic() + wait_s)


def _flock(file: IO[str], until_s: float) -> bool:
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= until_s:
                return False
            time.sleep(0.05)


@contextmanager
def _as_state_error(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise StateError(f"cannot write {path}: {e.strerror or e} (set AREAL_SKY_HOME to a folder that can)") from None
