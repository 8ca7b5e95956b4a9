"""The keys of SkyPilot's task YAML, as data: what passes through untouched, and what type SkyPilot takes.

Source: sky/utils/schemas.py of SkyPilot 0.14.1, get_task_schema and get_resources_schema; `gpus` is its alias of
`accelerators` (resources.py, RESOURCE_CONFIG_ALIASES). Keys that begin with `_` are for its internal use and left out.
A `sky` test compares both tables with the installed SkyPilot.
"""

from __future__ import annotations

# Types of values, by letter: t text, i whole number, n number, b boolean, m mapping, l list.
TASK_KEYS: dict[str, str] = {
    "workdir": "tm", "event_callback": "t", "file_mounts": "m", "setup": "t", "run": "t", "envs": "m", "secrets": "ml",
    "managed_secrets": "l", "inputs": "m", "outputs": "m", "file_mounts_mapping": "m", "config": "m", "volumes": "m",
    "volume_mounts": "l", "api_server_access": "b",
}  # fmt: skip

# Keys that we read ourselves, under the same name and with the same meaning.
TASK_KEYS_READ = ("name", "resources", "num_nodes")

# Keys that make it another thing than a task, with the reason that we say.
TASK_KEYS_REFUSED: dict[str, str] = {
    "service": "`service` is SkyServe's (`sky serve up`)",
    "pool": "`pool` is for SkyPilot's managed jobs (`sky jobs pool apply`)",
}

RESOURCES_KEYS: dict[str, str] = {
    "cloud": "t", "region": "t", "zone": "t", "use_spot": "b", "job_recovery": "tm", "volumes": "l",
    "ephemeral_storage": "ti", "disk_tier": "t", "network_tier": "t", "local_disk": "t", "max_hourly_cost": "n",
    "ports": "til", "labels": "m", "accelerator_args": "m", "image_id": "tm", "autostop": "tibm", "priority": "i",
    "priority_class": "t", "infra": "t", "cpus": "tn", "memory": "tn", "accelerators": "tml", "gpus": "tml",
    "instance_type": "t", "disk_size": "ti", "any_of": "l", "ordered": "l",
}  # fmt: skip

TYPE_WORDS = {
    "t": "text", "i": "a whole number", "n": "a number", "b": "true or false", "m": "a mapping", "l": "a list",
}  # fmt: skip
