"""What of a user's own keys changes on the way into a task YAML: secrets held back, sources rooted, our wheel added.

Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from areal_sky.spec.cluster import ClusterSpec

DEFAULT_PACKAGE = "areal-sky"
WHEEL_STEM = "areal_sky-"
WHEEL_DIR = "~/.areal_sky/wheel"  # on the machines
# Names of variables that hold secrets by custom: such an entry of `envs` is given at launch, as `secrets` are.
_SECRET_ENV = re.compile(
    r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|(API|ACCESS|PRIVATE|SECRET)?_?KEY)(_|$)", re.IGNORECASE
)
MASK = "<secret, not kept>"  # stands for a secret in what is written to disk (core/masking.py)
_URL_PASSWORD = re.compile(r"\w://[^/@\s]*:[^/@\s]+@")
# How a machine gets areal_sky (core/installscript.py): set in the spec's `envs`, they hold for the head too.
INSTALL_ENVS = ("AREAL_SKY_PACKAGE", "AREAL_SKY_PYTHON", "AREAL_SKY_RAY_VERSION")


def is_secret_env(name: str, value: str) -> bool:
    """Whether an entry of `envs` holds a secret: by its name, as a password in a URL, or masked on disk."""
    return value == MASK or bool(_SECRET_ENV.search(name) or _URL_PASSWORD.search(value))


def secret_envs(spec: ClusterSpec) -> dict[str, str]:
    """The entries of the spec's `envs` that hold a secret, by their name or as a password in a URL."""
    envs = cast("Mapping[str, Any]", spec.task.get("envs") or {})
    text = {k: str(v) for k, v in envs.items() if v not in (None, "")}
    return {k: v for k, v in text.items() if is_secret_env(k, v)}


def package(spec: ClusterSpec, wheel: str) -> tuple[dict[str, str], dict[str, str]]:
    """What decides how a machine gets areal_sky: environment and file mounts. The user's `envs` may override it."""
    envs = cast("Mapping[str, Any]", spec.task.get("envs") or {})
    chosen = {k: str(envs[k]) for k in INSTALL_ENVS if envs.get(k) is not None}
    if "AREAL_SKY_PACKAGE" in chosen or not wheel:
        return {"AREAL_SKY_PACKAGE": DEFAULT_PACKAGE} | chosen, {}
    mounted = f"{WHEEL_DIR}/{wheel.rpartition('/')[2]}"
    return {"AREAL_SKY_PACKAGE": mounted} | chosen, {mounted: wheel}


def local_sources(task: Mapping[str, Any]) -> dict[str, str]:
    """Key (`workdir` or a mount's target) -> path, of what is to be copied from a relative path of this machine."""
    named = {"workdir": task.get("workdir")} | dict(cast("Mapping[str, Any]", task.get("file_mounts") or {}))
    plain = {k: v for k, v in named.items() if isinstance(v, str)}
    return {k: v for k, v in plain.items() if not v.startswith(("/", "~", f"./{WHEEL_STEM}")) and "://" not in v}


def rooted(task: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """`workdir` and `file_mounts` of the task, where it has them, with relative sources taken from `folder`."""
    found = {k: f"{folder}/{v}" for k, v in local_sources(task).items()}
    result: dict[str, Any] = {}
    if "workdir" in found:
        result["workdir"] = found.pop("workdir")
    if found:
        result["file_mounts"] = {k: found.get(k, v) for k, v in task["file_mounts"].items()}
    return result


def secret_names(spec: ClusterSpec) -> tuple[str, ...]:
    """Names of what is given at launch: `secrets`, in either form that SkyPilot takes, and the secret `envs`."""
    secrets = cast("Sequence[object] | Mapping[object, object]", spec.task.get("secrets") or ())
    return tuple(dict.fromkeys((*(str(name) for name in secrets), *secret_envs(spec))))
