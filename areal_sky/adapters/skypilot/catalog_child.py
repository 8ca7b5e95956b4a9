"""The process that asks SkyPilot's catalogs: `python -m areal_sky.adapters.skypilot.catalog_child`, questions on stdin.

A process of its own, so that planning neither imports SkyPilot into the caller (seconds, 160 MB, prints of its own)
nor ever hangs: the caller ends it at a deadline. It asks the very functions that SkyPilot's optimizer asks: which
machine of each enabled cloud is feasible, in which regions and zones, at what price. It launches and changes nothing.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

# SkyPilot itself takes the cheapest type only; the next ones may be in regions where that one is not.
TYPES_PER_CLOUD = 4
FETCH_TIMEOUT_S = 5.0
OWN_MACHINES = ("slurm", "kubernetes", "ssh")  # their catalogs ask the cluster, so need the network
UNPRICED = 0.0  # what SkyPilot says for machines that nobody has put a price on


def main() -> None:
    """Reads {"asks": [...], "offline": bool} and writes the answer as one JSON object."""
    answer_fd = os.dup(1)
    os.dup2(2, 1)  # SkyPilot prints on stdout as it likes
    question = json.load(sys.stdin)
    _guard_network(question["offline"])
    try:
        answer = _answer(question["asks"], question["offline"])
    except Exception as e:  # whatever breaks there, the plan goes on without it and says so
        answer = {"error": _one_line(e)}
    with os.fdopen(answer_fd, "w", encoding="utf-8") as out:
        json.dump(answer, out)


def _guard_network(offline: bool) -> None:
    """No request without a timeout; offline, none at all."""
    import requests

    plain = requests.Session.request

    def with_timeout(session: Any, *args: Any, timeout: Any = None, **kwargs: Any) -> Any:
        return plain(session, *args, timeout=timeout or FETCH_TIMEOUT_S, **kwargs)

    requests.Session.request = with_timeout  # type: ignore[method-assign]
    if not offline:
        return
    connect = socket.socket.connect

    def refuse(sock: socket.socket, address: Any) -> None:
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            raise OSError("offline, as asked for")
        connect(sock, address)

    socket.socket.connect = refuse  # type: ignore[method-assign, assignment]
    socket.getaddrinfo = _no_names  # type: ignore[assignment]
    from sky.catalog import common

    # A stale catalog is used as it is: a failed fetch would mark it as fresh for hours.
    common.is_catalog_modified = lambda filename: True


def _no_names(*args: Any, **kwargs: Any) -> Any:
    raise socket.gaierror(socket.EAI_FAIL, "offline, as asked for")


def _answer(asks: list[dict[str, Any]], offline: bool) -> dict[str, Any]:
    enabled = _enabled_clouds()
    answer: dict[str, Any] = {"clouds": [str(c).lower() for c in enabled], "groups": {}, "failed": {}, "offers": []}
    usable: list[Any] = []
    for cloud in enabled:
        name = str(cloud).lower()
        if offline and (name in OWN_MACHINES or not _catalog(name).exists()):
            answer["failed"][name] = "not asked while offline" if name in OWN_MACHINES else "its catalog is not here"
        else:
            usable.append(cloud)
    for ask in asks:
        answer["groups"][ask["group"]] = _ask(ask, enabled, usable, answer)
    return answer


def _enabled_clouds() -> list[Any]:
    """What the last `sky check` found, on whichever API server is in use; nothing is checked anew."""
    from sky import clouds, global_user_state, skypilot_config
    from sky.server import common as server
    from sky.utils import registry

    if not server.is_api_server_local():
        import sky

        names = sky.get(sky.enabled_clouds())
        found = [registry.CLOUD_REGISTRY.from_str(n) for n in names]
        return [c for c in found if c is not None]
    workspace = skypilot_config.get_active_workspace()
    return global_user_state.get_cached_enabled_clouds(clouds.cloud.CloudCapability.COMPUTE, workspace)


def _ask(ask: dict[str, Any], enabled: list[Any], usable: list[Any], answer: dict[str, Any]) -> dict[str, Any]:
    """Adds the offers that would do for one group to the answer; returns what there is to say where none would."""
    import sky

    said: dict[str, Any] = {"hints": {}, "near": [], "not_enabled": [], "wrong": "", "asked": [], "offers": 0}
    config = _without(ask["resources"], ("use_spot", "max_hourly_cost"))  # both are the plan's own business
    if ask["infra"]:
        config = {k: v for k, v in config.items() if k not in ("cloud", "region", "zone")} | {"infra": ask["infra"]}
    try:
        wanted = list(sky.Resources.from_yaml_config(config))
    except Exception as e:
        return said | {"wrong": _one_line(e)}
    names = [str(c).lower() for c in enabled]
    near: set[str] = set()
    asked: set[str] = set()
    before = len(answer["offers"])
    for resources in wanted:
        named = None if resources.cloud is None else str(resources.cloud).lower()
        if named is not None and named not in names:
            said["not_enabled"].append(named)
            continue
        asked |= {named} if named else set(names)
        for cloud in usable:
            name = str(cloud).lower()
            if named not in (None, name) or name in answer["failed"]:
                continue
            try:
                for offer in _cloud_offers(cloud, name, resources, ask, said, near):
                    answer["offers"].append(offer)
            except ValueError as e:  # SkyPilot's way to say that a region, zone or type does not exist
                said["hints"][name] = _one_line(e)
            except Exception as e:
                answer["failed"][name] = _one_line(e)
    return said | {
        "near": sorted(near),
        "not_enabled": sorted(set(said["not_enabled"])),
        "asked": sorted(asked),
        "offers": len(answer["offers"]) - before,
    }


def _without(config: dict[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    kept = {k: v for k, v in config.items() if k not in keys}
    for entries in ("any_of", "ordered"):
        if kept.get(entries):
            kept[entries] = [_without(entry, keys) for entry in kept[entries]]
    return kept


def _cloud_offers(
    cloud: Any, name: str, resources: Any, ask: dict[str, Any], said: dict[str, Any], near: set[str]
) -> Iterator[dict[str, Any]]:
    from sky.utils import resources_utils

    for market in ("on_demand", "spot"):
        one = resources.copy(cloud=cloud, use_spot=market == "spot")
        one.validate()
        feasible = cloud.get_feasible_launchable_resources(one, ask["nodes"])
        near.update(feasible.fuzzy_candidate_list)
        if feasible.hint and market == "on_demand":
            said["hints"][name] = " ".join(_reason(feasible.hint).split())
        for typed in feasible.resources_list[:TYPES_PER_CLOUD]:
            for placed in resources_utils.make_launchables_for_valid_region_zones(typed):
                try:
                    usd = placed.get_cost(3600)
                except ValueError:
                    continue  # no price in this market there, which is how the catalog says "not to be had"
                yield _offer(cloud, name, placed, market, usd)


def _offer(cloud: Any, name: str, placed: Any, market: str, usd: float) -> dict[str, Any]:
    cpus, memory_gib = cloud.get_vcpus_mem_from_instance_type(placed.instance_type)
    accelerator, count = next(iter((placed.accelerators or {}).items()), (None, 0))
    own = name in OWN_MACHINES
    return {
        "cloud": name,
        "region": placed.region,
        "zone": placed.zone,
        "instance_type": placed.instance_type,
        "accelerator": accelerator,
        "gpus": float(count),
        "cpus": cpus,
        "memory_gib": memory_gib,
        "market": market,
        "usd": None if own and usd == UNPRICED else round(usd, 6),
        "source": _source(name),
    }


def _catalog(name: str) -> Path:
    from sky.catalog import common

    return Path(common.get_catalog_path(f"{name}/vms.csv"))


def _source(name: str) -> str:
    """Where the prices of a cloud come from, and since when they have been on this machine."""
    if name in OWN_MACHINES:
        return f"SkyPilot configuration of {name}"
    from sky.catalog import common

    fetched = Path(common.get_catalog_path(f".meta/{name}/vms.csv.md5"))
    if not fetched.exists():
        return f"SkyPilot catalog {name}, a file put there by hand"
    day = datetime.fromtimestamp(fetched.stat().st_mtime, UTC).date()
    return f"SkyPilot catalog {name}, fetched {day}"


def _reason(hint: str) -> str:
    """SkyPilot explains unsupported features as a table under a heading: its last column says why."""
    rows = [line.strip() for line in hint.splitlines() if line.strip()]
    if len(rows) > 2 and rows[1].startswith("Feature"):
        return "; ".join(row.partition(" ")[2].strip() for row in rows[2:])
    return hint


def _one_line(e: BaseException) -> str:
    text = " ".join(str(e).split()) or type(e).__name__
    return text if len(text) <= 300 else text[:297] + "..."


if __name__ == "__main__":
    main()
