"""The environment that a head or a node process is started with: the one contract between us and a machine.

The same variables are set by the local backend and by the `envs` and `secrets` of generated SkyPilot tasks.
Secrets are kept apart so that they can travel as SkyPilot `secrets` and never appear in a file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from areal_sky.core.model import NodeShape
from areal_sky.errors import InvalidInput

DEFAULT_RAY_PORT = 6379
DEFAULT_GATEWAY_PORT = 8790
DEFAULT_LEASE_S = 600.0

# Marks every process of a node, so that a pretend machine can be switched off whole.
NODE_MARK = "AREAL_SKY_NODE"
SECRET_KEYS = ("AREAL_SKY_TOKENS", "AREAL_SKY_NODE_TOKEN", "AREAL_SKY_RAY_TOKEN")


@dataclass(frozen=True, slots=True)
class GroupShape:
    """What the cluster may at most become, per group: lets the scheduler refuse a gang that can never fit."""

    name: str
    shape: NodeShape
    nodes_per_replica: int
    min_replicas: int
    max_replicas: int


@dataclass(frozen=True, slots=True)
class HeadEnv:
    """What a head needs to know. `state_dir` holds its journal and Ray's GCS store.

    `ray_port` and `gateway_port` 0 mean: pick a free one and write it to `state_dir`/address.json.
    `weights` are (model_type, weight) pairs, `models` (name, model_type) pairs.
    """

    cluster: str
    replica: str
    state_dir: str
    ray_port: int = DEFAULT_RAY_PORT
    gateway_port: int = DEFAULT_GATEWAY_PORT
    groups: tuple[GroupShape, ...] = ()
    weights: tuple[tuple[str, float], ...] = ()
    models: tuple[tuple[str, str], ...] = ()
    ageing_per_hour: float = 1.0
    lease_s: float = DEFAULT_LEASE_S
    idle_shutdown_s: float = 1800.0
    shape: NodeShape | None = None  # None: what Ray finds on the machine

    def to_env(self) -> dict[str, str]:
        return {"AREAL_SKY_HEAD_CONFIG": json.dumps(asdict(self), sort_keys=True)}

    @staticmethod
    def from_env(env: Mapping[str, str]) -> HeadEnv:
        """Raises InvalidInput when the variable is missing or damaged."""
        raw = _json(env, "AREAL_SKY_HEAD_CONFIG")
        try:
            groups = tuple(
                GroupShape(**{**g, "shape": NodeShape(**g["shape"])}) for g in raw.pop("groups", [])
            )
            shape = raw.pop("shape", None)
            weights = tuple((str(k), float(v)) for k, v in raw.pop("weights", []))
            models = tuple((str(k), str(v)) for k, v in raw.pop("models", []))
            return HeadEnv(
                **raw,
                groups=groups,
                weights=weights,
                models=models,
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
        raw = _json(env, "AREAL_SKY_NODE_CONFIG")
        if env.get("AREAL_SKY_HEAD_IP"):
            raw["head_ip"] = env["AREAL_SKY_HEAD_IP"]
        if env.get("AREAL_SKY_REPLICA"):
            raw["replica"] = env["AREAL_SKY_REPLICA"]
        if env.get("SKYPILOT_NODE_RANK"):
            raw["index"] = int(env["SKYPILOT_NODE_RANK"])
        try:
            shape = raw.pop("shape", None)
            return NodeEnv(**raw, shape=None if shape is None else NodeShape(**shape))
        except (TypeError, ValueError) as e:
            raise InvalidInput(f"AREAL_SKY_NODE_CONFIG is damaged: {e}") from None


def _json(env: Mapping[str, str], key: str) -> dict[str, object]:
    text = env.get(key)
    if not text:
        raise InvalidInput(f"{key} is not set: this command is started by areal_sky, not by hand")
    try:
        value = json.loads(text)
    except ValueError as e:
        raise InvalidInput(f"{key} is not JSON: {e}") from None
    if not isinstance(value, dict):
        raise InvalidInput(f"{key} must be a JSON object")
    return value  # type: ignore[return-value]
