"""SkyPilot's records as the orphan sweep needs them: every cluster with its labels, and ending one. Blocks.

`NamesAhead` asks for them in a process of its own, while the caller does something else and without importing `sky`.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from areal_sky.adapters.catalog import listed_price
from areal_sky.adapters.skypilot.errors import translate
from areal_sky.adapters.skypilot.offers import ever_checked, installed
from areal_sky.adapters.skypilot.requests import SkyApi, _sky
from areal_sky.core.orphans import SkyFound
from areal_sky.errors import ArealSkyError, NotFound, StateError


def in_use() -> bool:
    """Whether SkyPilot is installed and was ever set up by this user: asking it would start its API server else."""
    return installed() and ever_checked()


class SkyRecords:
    """`run.orphans.SkyPort` over SkyPilot's SDK."""

    def clusters(self) -> tuple[SkyFound, ...]:
        """All clusters that SkyPilot has on record, other users' included. Raises Unreachable, Unauthorized, ..."""
        try:
            sdk = _sky()[1]
            mine = {r["name"] for r in sdk.get(sdk.status())}
            records = sdk.get(sdk.status(all_users=True))
        except ArealSkyError:
            raise
        except (Exception, SystemExit) as e:
            raise translate(e) from None
        return tuple(_found(r, r["name"] in mine) for r in records)

    def end(self, name: str) -> None:
        """`sky down`, then a look whether it is gone. Raises StateError when it is still listed."""
        api = SkyApi()
        sdk = _sky()[1]
        try:
            sdk.get(api.down(name))
        except ArealSkyError:
            raise
        except (Exception, SystemExit) as e:
            error = translate(e)
            if not isinstance(error, NotFound):
                raise error from None
        if name in api.clusters([name]):
            raise StateError(f"`sky down {name}` ended, and SkyPilot still lists it")


def _found(record: Any, mine: bool) -> SkyFound:
    handle = record["handle"]
    resources = getattr(handle, "launched_resources", None)
    nodes = int(record["nodes"] or 1)
    cloud, region = str(record["cloud"] or ""), str(record["region"] or "")
    price = None
    if resources is not None and resources.instance_type:
        market = "spot" if resources.use_spot else "on_demand"
        price = listed_price(cloud.lower(), region, str(resources.instance_type), market)
    accelerators = dict(getattr(resources, "accelerators", None) or {})
    kind = ", ".join(f"{name}:{count:g}" for name, count in accelerators.items())
    kind = kind or str(getattr(resources, "instance_type", None) or "machine")
    return SkyFound(
        name=record["name"],
        name_on_cloud=record["cluster_name_on_cloud"] or getattr(handle, "cluster_name_on_cloud", "") or "",
        labels=dict(record["labels"] or {}),
        launched_s=float(record["launched_at"] or 0),
        mine=mine,
        user=record["user_name"] or "",
        where="/".join(x for x in (cloud.lower(), region) if x),
        what=f"{nodes} x {kind}, {record['status'].value}",
        usd_per_hour=None if price is None else price * nodes,
    )


@dataclass(frozen=True, slots=True)
class Taken:
    """A SkyPilot cluster that exists, whoever made it."""

    name: str
    labels: Mapping[str, str]
    user: str


class NamesAhead:
    """Starts asking at once; `get` waits for the answer."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "areal_sky.adapters.skypilot.sweep"]
        self._child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )

    def get(self, timeout_s: float = 60.0) -> tuple[Taken, ...] | None:
        """None when SkyPilot gave no answer: nothing is known then."""
        try:
            out, _ = self._child.communicate(timeout=timeout_s)
            return tuple(Taken(**c) for c in json.loads(out)) if self._child.returncode == 0 else None
        except (subprocess.TimeoutExpired, ValueError, TypeError):
            return None
        finally:
            self.close()

    def close(self) -> None:
        if self._child.poll() is None:
            self._child.kill()
            self._child.wait()
        if self._child.stdout is not None:
            self._child.stdout.close()


def main() -> None:
    """Prints every cluster's name, labels and user as JSON."""
    answer = os.dup(1)
    os.dup2(2, 1)  # SkyPilot prints on stdout as it likes
    try:
        clusters = SkyApi().clusters().values()
    except ArealSkyError as e:
        sys.exit(str(e))
    found = [{"name": c.name, "labels": dict(c.labels), "user": c.user} for c in clusters]
    with contextlib.suppress(BrokenPipeError), os.fdopen(answer, "w", encoding="utf-8") as out:
        json.dump(found, out)


if __name__ == "__main__":
    main()
