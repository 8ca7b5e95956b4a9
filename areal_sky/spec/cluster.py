"""The typed spec: what a user asked for, frozen, with every default filled in.

Built only by `areal_sky.spec.load`; the grammar and its mistakes live in the sibling modules, which check every value
before it gets here. Dataclasses, not pydantic: its import alone takes half of the time that `areal-sky check` may.
Durations are seconds, memory is GiB, money is US dollars.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

from areal_sky.spec.memory import Settings

Market = Literal["on_demand", "spot", "mixed"]
ModelType = str  # "moe", "base" or any name that `scheduling.priority` lists


class Frozen:
    """Base of all spec values: immutable, made by keyword."""

    __slots__ = ()

    def model_copy(self, *, update: dict[str, Any]) -> Self:
        """The same value with some fields changed."""
        return replace(self, **update)  # type: ignore[type-var]


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorAsk(Frozen):
    """One accelerator that would do. Either a named one or "any with at least this much memory".

    `name` is the canonical name (`V100`, `A100-80GB`, `tpu-v5e-8`), or None when `min_memory_gib` says it all.
    `count` is per node and may be a fraction below 1 (`V100:0.5`). `min_memory_gib` comes from `80GB+` (at least)
    and `80GB` (exactly; then `max_memory_gib` equals it). `vendor` (nvidia, amd, ...) narrows an ask by memory.
    `infra` is the place where only this choice holds (an `any_of`/`ordered` entry with a place of its own).
    `areal_sky.spec.accelerators.matching` lists the names that satisfy an ask.
    """

    name: str | None
    count: float
    min_memory_gib: float | None = None
    max_memory_gib: float | None = None
    vendor: str | None = None
    infra: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourcesSpec(Frozen):
    """What one node of a group must have.

    `accelerators`: the choices; empty means a CPU node. `ordered` says that earlier ones are preferred (a list or
    `ordered:`), otherwise the cheapest wins (a mapping, a set or `any_of:`).
    `cpus` and `memory_gib` are minima per node; None leaves them to the instance type.
    `raw` is the SkyPilot `resources` mapping as the user wrote it (deep-frozen JSON values), carried to SkyPilot.
    """

    accelerators: tuple[AcceleratorAsk, ...] = ()
    ordered: bool = False
    cpus: float | None = None
    memory_gib: float | None = None
    use_spot: bool | None = None
    infra: str | None = None
    instance_type: str | None = None
    image_id: str | None = None
    disk_size_gib: int | None = None
    raw: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroupSpec(Frozen):
    """A named group of like machines.

    A fixed group (`elastic` False) is one replica of `nodes_per_replica` nodes, provisioned together as a
    training gang needs. An elastic one has `min_replicas..max_replicas` replicas, each a SkyPilot cluster of its own.
    """

    name: str
    resources: ResourcesSpec
    elastic: bool
    min_replicas: int
    max_replicas: int
    nodes_per_replica: int
    market: Market
    on_demand_base: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec(Frozen):
    """A model that the runs train or serve; `train` and `rollout` are AReaL backend strings.

    `config` is the name of a common model or the path of a Hugging Face config.json; the model's own name counts where
    it is left out. `memory` is what its memory estimates assume; `memory_check` (refuse, warn or skip) what becomes of
    an allocation that cannot fit.
    """

    name: str
    model_type: ModelType
    config: str | None = None
    train: str | None = None
    rollout: str | None = None
    memory: Settings = field(default_factory=Settings)
    memory_check: str = "refuse"


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorityWeight(Frozen):
    model_type: ModelType
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec(Frozen):
    name: str
    model_type: ModelType
    guaranteed_gpus: float = 0
    max_gpus: float | None = None
    borrow: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingSpec(Frozen):
    """How waiting tasks are ordered. `ageing_per_hour` is score gained by an hour of waiting."""

    strategy: str = "dynamic"
    priority: tuple[PriorityWeight, ...] = ()
    pools: tuple[PoolSpec, ...] = ()
    ageing_per_hour: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingSpec(Frozen):
    """When elastic groups grow and shrink.

    `policy` names a preset of policies/scaling, a built-in or module:function; `options` are its own numbers.
    `target_utilization` is a share (0..1]. A group idle for `idle_s` may shrink; `cooldown_s` passes between decisions.
    """

    policy: str = "balance"
    target_utilization: float = 0.85
    cooldown_s: float = 120.0
    idle_s: float = 300.0
    options: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotSpec(Frozen):
    """How spot machines are used.

    Refused for `patience_s` in a row, a group goes on demand; spot is tried again `hold_s` after the last refusal.
    `slurm_partition` is what stands for spot on Slurm, which has no such machines: a partition that gives way.
    """

    policy: str = "uniform_saver"
    max_spot_price_frac: float | None = None
    patience_s: float = 600.0
    hold_s: float = 1800.0
    slurm_partition: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetSpec(Frozen):
    """Caps. `deadline_s` is a Unix time."""

    max_hourly_usd: float | None = None
    max_total_usd: float | None = None
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetrySpec(Frozen):
    critical_interval_s: float = 0.1
    normal_interval_s: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertSpec(Frozen):
    """`when` as written; `metric`, `op`, `threshold` are its parts. `for_s` is how long it must hold.

    `op` None: `when` is the name of something that is found without being asked for. `then`: what is done.
    """

    when: str
    metric: str
    op: Literal[">", ">=", "<", "<=", "==", "!="] | None
    threshold: float
    for_s: float = 0.0
    then: tuple[str, ...] = ("notify",)


@dataclass(frozen=True, slots=True, kw_only=True)
class NotifySpec(Frozen):
    """Who is told of alerts beside the head's log. `webhook`: a URL, or $NAME of the head's environment."""

    webhook: str | None = None
    command: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec(Frozen):
    """One cluster, complete.

    `infra` is `local`, a SkyPilot infra string, or None (any infra that SkyPilot finds enabled).
    `head` is what the head node needs (a CPU machine by default). `task` holds the SkyPilot task keys that pass
    through to every group's YAML untouched: workdir, file_mounts, envs, secrets, setup, run, config, ...
    `guesses` says in words what was defaulted, for `plan` to show.
    """

    name: str
    infra: str | None
    head: ResourcesSpec
    groups: tuple[NodeGroupSpec, ...]
    models: tuple[ModelSpec, ...] = ()
    scheduling: SchedulingSpec = SchedulingSpec()
    scaling: ScalingSpec = ScalingSpec()
    spot: SpotSpec = SpotSpec()
    budget: BudgetSpec = BudgetSpec()
    telemetry: TelemetrySpec = TelemetrySpec()
    alerts: tuple[AlertSpec, ...] = ()
    notify: NotifySpec = NotifySpec()
    idle_shutdown_s: float = 1800.0
    task: dict[str, Any] = field(default_factory=dict[str, Any])
    guesses: tuple[str, ...] = ()

    @property
    def is_local(self) -> bool:
        return self.infra == "local"

    def group(self, name: str) -> NodeGroupSpec | None:
        """The group of that name, or None."""
        return next((g for g in self.groups if g.name == name), None)

    def weight(self, model_type: ModelType | None) -> float:
        """The scheduling weight of a model type; 1.0 where none is given."""
        return next((p.weight for p in self.scheduling.priority if p.model_type == model_type), 1.0)
