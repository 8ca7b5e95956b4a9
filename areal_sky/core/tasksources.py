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


def local_sources(task: Mapping[str, Any]) -> list[str]:
    """What is to be copied from a relative path of this machine: `workdir`, and sources of `file_mounts`."""
    mounts = cast("Mapping[str, Any]", task.get("file_mounts") or {})
    named = [task.get("workdir"), *(s for mount in mounts.values() for s in _sources(mount))]
    return [s for s in named if isinstance(s, str) and _is_relative(s)]


def rooted(task: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """`workdir` and `file_mounts` of the task, where it has them, with relative sources taken from `folder`."""

    def root(source: Any) -> Any:
        if isinstance(source, list):
            return [root(s) for s in cast("list[Any]", source)]
        if isinstance(source, Mapping):  # {source: ..., mode: ...}: storage
            storage = dict(cast("Mapping[str, Any]", source))
            return {k: root(v) if k == "source" else v for k, v in storage.items()}
        return f"{folder}/{source}" if isinstance(source, str) and _is_relative(source) else source

    result: dict[str, Any] = {}
    if isinstance(task.get("workdir"), str):
        result["workdir"] = root(task["workdir"])
    if task.get("file_mounts"):
        result["file_mounts"] = {k: root(v) for k, v in task["file_mounts"].items()}
    return result


def _sources(mount: Any) -> list[Any]:
    source = cast("Mapping[str, Any]", mount).get("source") if isinstance(mount, Mapping) else mount
    return cast("list[Any]", source) if isinstance(source, list) else [source]


def _is_relative(source: str) -> bool:
    return not source.startswith(("/", "~", f"./{WHEEL_STEM}")) and "://" not in source


def secret_names(spec: ClusterSpec) -> tuple[str, ...]:
    """Names of what is given at launch: `secrets`, in either form that SkyPilot takes, and the secret `envs`."""
    secrets = cast("Sequence[object] | Mapping[object, object]", spec.task.get("secrets") or ())
    return tuple(dict.fromkeys((*(str(name) for name in secrets), *secret_envs(spec))))
