"""The environment that a head or a node process is started with: the one contract between us and a machine.

The same variables are set by the local backend and by the `envs` and `secrets` of generated SkyPilot tasks.
Secrets are kept apart so that they can travel as SkyPilot `secrets` and never appear in a file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

from areal_sky.core.memory_terms import ModelNeed
from areal_sky.core.model import NodeShape
from areal_sky.errors import InvalidInput
from areal_sky.spec.cluster import AlertSpec

DEFAULT_RAY_PORT = 6379
DEFAULT_GATEWAY_PORT = 8790
DEFAULT_LEASE_S = 600.0

# Exit code of a head or node process that can never work as configured: it is not started again.
EXIT_NEVER = 78
# Marks every process of a node, so that a pretend machine can be switched off whole.
NODE_MARK = "AREAL_SKY_NODE"


@dataclass(frozen=True, slots=True)
class GroupShape:
    """What the cluster may at most become, per group: lets the scheduler refuse a gang that can never fit."""

    name: str
    shape: NodeShape
    nodes_per_replica: int
    min_replicas: int
    max_replicas: int


@dataclass(frozen=True, slots=True)
class PoolShare:
    """GPUs for the tasks of one model type: guaranteed, at most (None: no limit); `borrow` idle ones beyond."""

    name: str
    model_type: str
    guaranteed_gpus: float = 0.0
    max_gpus: float | None = None
    borrow: bool = True


@dataclass(frozen=True, slots=True)
class HeadEnv:
    """What a head needs to know. `state_dir` holds its journal and Ray's GCS store.

    `ray_port` and `gateway_port` 0 mean: pick a free one and write it to `state_dir`/address.json.
    `weights` are (model_type, weight) pairs, `models` (name, model_type) pairs, `needs` what these take of memory.
    """

    cluster: str
    replica: str
    state_dir: str
    ray_port: int = DEFAULT_RAY_PORT
    gateway_port: int = DEFAULT_GATEWAY_PORT
    groups: tuple[GroupShape, ...] = ()
    weights: tuple[tuple[str, float], ...] = ()
    models: tuple[tuple[str, str], ...] = ()
    needs: tuple[ModelNeed, ...] = ()
    ageing_per_hour: float = 1.0
    strategy: str = "dynamic"  # who goes first: `scheduling.strategy` of the spec
    pools: tuple[PoolShare, ...] = ()
    lease_s: float = DEFAULT_LEASE_S
    idle_shutdown_s: float = 1800.0
    shape: NodeShape | None = None  # None: what Ray finds on the machine
    alerts: tuple[AlertSpec, ...] = ()
    webhook: str | None = None  # who is told of alerts: a URL, or $NAME of the head's environment
    alert_command: str | None = None

    def to_env(self) -> dict[str, str]:
        return {"AREAL_SKY_HEAD_CONFIG": json.dumps(asdict(self), sort_keys=True)}

    @staticmethod
    def from_env(env: Mapping[str, str]) -> HeadEnv:
        """Reads the config, then lets single variables override it (see `_config`).

        Raises InvalidInput when it is missing or damaged.
        """
        raw = _config(env, "AREAL_SKY_HEAD_CONFIG", ("CLUSTER", "REPLICA", "STATE_DIR", *_PORTS))
        try:
            groups = tuple(
                GroupShape(**cast("dict[str, Any]", {**g, "shape": NodeShape(**g["shape"])}))
                for g in raw.pop("groups", [])
            )
            shape = raw.pop("shape", None)
            weights = tuple((str(k), float(v)) for k, v in raw.pop("weights", []))
            pools = tuple(PoolShare(**cast("dict[str, Any]", p)) for p in raw.pop("pools", []))
            models = tuple((str(k), str(v)) for k, v in raw.pop("models", []))
            alerts = tuple(
                AlertSpec(**cast("dict[str, Any]", {**a, "then": tuple(a["then"])})) for a in raw.pop("alerts", [])
            )
            needs = tuple(ModelNeed(**cast("dict[str, Any]", n)) for n in raw.pop("needs", []))
            return HeadEnv(
                **raw,
                groups=groups,
                weights=weights,
                models=models,
                needs=needs,
                pools=pools,
                alerts=alerts,
                shape=None if shape is None else NodeShape(**shape),
            )
        except (TypeError, KeyError, ValueError) as e:
            raise InvalidInput(f"AREAL_SKY_HEAD_CONFIG is damaged: {e}") from None


@dataclass(frozen=True, slots=True)
class NodeEnv:
    """What a node needs to know to join. `index` counts the nodes of a replica from 0."""

    cluster: str
    group: str
    replica: str
    index: int
    head_ip: str
    ray_port: int = DEFAULT_RAY_PORT
    gateway_port: int = DEFAULT_GATEWAY_PORT
    state_dir: str = ""
    lease_s: float = DEFAULT_LEASE_S
    critical_interval_s: float = 0.1
    normal_interval_s: float = 1.0
    shape: NodeShape | None = None  # None: what Ray finds on the machine
    simulated_gpus: bool = False  # the local backend's pretend GPUs

    def to_env(self) -> dict[str, str]:
        return {"AREAL_SKY_NODE_CONFIG": json.dumps(asdict(self), sort_keys=True)}

    @staticmethod
    def from_env(env: Mapping[str, str]) -> NodeEnv:
        """Reads the config, then lets single variables (AREAL_SKY_HEAD_IP, AREAL_SKY_REPLICA, ...) override it.

        On SkyPilot nodes SKYPILOT_NODE_RANK gives the index. Raises InvalidInput.
        """
        names = ("CLUSTER", "GROUP", "REPLICA", "HEAD_IP", "STATE_DIR", *_PORTS)
        raw = _config(env, "AREAL_SKY_NODE_CONFIG", names)
        if env.get("SKYPILOT_NODE_RANK"):
            raw["index"] = int(env["SKYPILOT_NODE_RANK"])
        try:
            shape = raw.pop("shape", None)
            return NodeEnv(**raw, shape=None if shape is None else NodeShape(**shape))
        except (TypeError, ValueError) as e:
            raise InvalidInput(f"AREAL_SKY_NODE_CONFIG is damaged: {e}") from None


_PORTS = ("RAY_PORT", "GATEWAY_PORT")


def _config(env: Mapping[str, str], key: str, names: tuple[str, ...]) -> dict[str, Any]:
    """The JSON config with single variables over it: AREAL_SKY_HEAD_IP sets `head_ip`, and so on.

    With AREAL_SKY_CLUSTER set no JSON is needed: a task YAML written by hand has only single variables.
    """
    raw = _json(env, key) if env.get(key) or not env.get("AREAL_SKY_CLUSTER") else {}
    for name in names:
        value = env.get(f"AREAL_SKY_{name}")
        if value:
            try:
                raw[name.lower()] = int(value) if name in _PORTS else value
            except ValueError:
                raise InvalidInput(f"AREAL_SKY_{name} is {value[:40]!r}, expected a port number") from None
    return raw


def _json(env: Mapping[str, str], key: str) -> dict[str, Any]:
    text = env.get(key)
    if not text:
        raise InvalidInput(f"{key} is not set: this command is started by areal_sky, not by hand")
    try:
        value: Any = json.loads(text)
    except ValueError as e:
        raise InvalidInput(f"{key} is not JSON: {e}") from None
    if not isinstance(value, dict):
        raise InvalidInput(f"{key} must be a JSON object")
    return cast("dict[str, Any]", value)
