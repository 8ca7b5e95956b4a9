"""TaskSpec on the wire: checked when it comes in, every mistake told at once."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, cast

from areal_sky.core.model import Bundle, TaskSpec
from areal_sky.errors import InvalidInput

KINDS = ("train", "rollout", "eval", "reward", "driver")
MAX_COMMAND_BYTES = 100_000  # Linux takes no single argument above 128 KiB
MAX_PAYLOAD_BYTES = 8 * 2**20
MAX_BUNDLES = 1024
# Set by the runner for every rank; a task cannot have its own.
RESERVED_ENVS = frozenset(
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES")
)
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_FIELDS = {f.name for f in fields(TaskSpec)}
_BUNDLE_FIELDS = {f.name for f in fields(Bundle)}


def task_spec_to_json(spec: TaskSpec) -> dict[str, Any]:
    """Plain JSON values, the bundle nested."""
    raw = asdict(spec)
    raw["envs"] = dict(spec.envs)
    raw["accelerators"] = list(spec.accelerators)
    return raw


def task_spec_from_json(raw: object) -> TaskSpec:
    """Checks and builds a spec. Raises InvalidInput that lists every mistake."""
    if not isinstance(raw, Mapping):
        raise InvalidInput("a task must be a JSON object")
    values = dict(cast("Mapping[str, Any]", raw))
    wrong: list[str] = []
    _unknown(values, _FIELDS, "task", wrong)
    bundle_raw = values.get("bundle")
    bundle: dict[str, Any] = {}
    if isinstance(bundle_raw, Mapping):
        bundle = dict(cast("Mapping[str, Any]", bundle_raw))
    elif bundle_raw is not None:
        wrong.append("bundle: expected an object with gpus, cpus, memory_gib")
    _unknown(bundle, _BUNDLE_FIELDS, "bundle", wrong)

    kind = _text(values, "kind", "", wrong)
    if kind not in KINDS:
        wrong.append(f"kind: {kind!r} is not one of {', '.join(KINDS)}{_did_you_mean(kind, KINDS)}")
    command = _text(values, "command", "", wrong)
    payload = _optional_text(values, "payload", wrong)
    if bool(command.strip()) == bool(payload):
        wrong.append(
            "command: expected a shell command line (or a Python callable instead), exactly one of them"
        )
    if len(command.encode("utf-8", "surrogatepass")) > MAX_COMMAND_BYTES:
        wrong.append(f"command: longer than {MAX_COMMAND_BYTES} bytes; put it into a file")
    if "\0" in command:
        wrong.append("command: holds a NUL character")
    if payload is not None and len(payload) > MAX_PAYLOAD_BYTES:
        wrong.append(f"payload: the pickled callable is larger than {MAX_PAYLOAD_BYTES // 2**20} MiB")
    name = _text(values, "name", "", wrong)
    if len(name) > 64 or not (name.isprintable() or not name):
        wrong.append("name: expected at most 64 printable characters")

    gpus = _number(bundle, "gpus", 0.0, 0, 1024, wrong, "bundle.")
    if gpus > 1 and gpus != int(gpus):
        wrong.append(f"bundle.gpus: {gpus:g} is neither whole nor a fraction below 1")
    cpus = _number(bundle, "cpus", 1.0, 0, 100_000, wrong, "bundle.")
    memory_gib = _number(bundle, "memory_gib", 0.0, 0, 1_000_000, wrong, "bundle.")
    if not gpus and not cpus:
        wrong.append("bundle: asks for neither GPUs nor CPUs")
    if not wrong and max(gpus and 1 / gpus, cpus and 1 / cpus) > 10_000:
        wrong.append("bundle: shares below 0.0001 are not counted")  # Ray's own resolution

    spec = TaskSpec(
        kind=kind,
        command=command,
        payload=payload,
        name=name,
        model=_optional_text(values, "model", wrong),
        model_type=_optional_text(values, "model_type", wrong),
        bundles=_whole(values, "bundles", 1, 1, MAX_BUNDLES, wrong),
        bundle=Bundle(gpus, cpus, memory_gib),
        priority=_number(values, "priority", 5.0, 0, 100, wrong),
        group=_optional_text(values, "group", wrong),
        accelerators=_names(values, wrong),
        envs=_envs(values, wrong),
        max_retries=_whole(values, "max_retries", 0, 0, 100, wrong),
        deadline_s=_optional_number(values, "deadline_s", wrong),
        submit_key=_optional_text(values, "submit_key", wrong),
    )
    if wrong:
        raise InvalidInput("\n".join(wrong))
    return spec


def _unknown(values: Mapping[str, Any], known: set[str], what: str, wrong: list[str]) -> None:
    for key in values:
        if key not in known:
            wrong.append(f"{what}: unknown key {str(key)[:40]!r}{_did_you_mean(str(key), known)}")


def _did_you_mean(word: str, known: object) -> str:
    close = difflib.get_close_matches(word, [str(k) for k in cast("list[str]", known)], 1)
    return f", did you mean {close[0]!r}?" if close else ""


def _text(values: Mapping[str, Any], key: str, default: str, wrong: list[str]) -> str:
    value = values.get(key, default)
    if isinstance(value, str):
        return value
    wrong.append(f"{key}: expected a text")
    return default


def _optional_text(values: Mapping[str, Any], key: str, wrong: list[str]) -> str | None:
    value = values.get(key)
    if value is None or (isinstance(value, str) and value):
        return value
    wrong.append(f"{key}: expected a non-empty text")
    return None


def _number(
    values: Mapping[str, Any],
    key: str,
    default: float,
    low: float,
    high: float,
    wrong: list[str],
    prefix: str = "",
) -> float:
    value: object = values.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        wrong.append(f"{prefix}{key}: expected a number")
    elif not low <= value <= high:
        wrong.append(f"{prefix}{key}: {value:g} is not between {low:g} and {high:g}")
    else:
        return float(value)
    return default


def _whole(values: Mapping[str, Any], key: str, default: int, low: int, high: int, wrong: list[str]) -> int:
    number = _number(values, key, default, low, high, wrong)
    if number != int(number):
        wrong.append(f"{key}: expected a whole number")
    return int(number)


def _optional_number(values: Mapping[str, Any], key: str, wrong: list[str]) -> float | None:
    return None if values.get(key) is None else _number(values, key, 0.0, 0, 1e12, wrong)


def _names(values: Mapping[str, Any], wrong: list[str]) -> tuple[str, ...]:
    value: object = values.get("accelerators") or ()
    if isinstance(value, list | tuple):
        items = cast("list[object]", list(cast("Any", value)))
        if all(isinstance(x, str) and x for x in items):
            return tuple(str(x) for x in items)
    wrong.append("accelerators: expected a list of names")
    return ()


def _envs(values: Mapping[str, Any], wrong: list[str]) -> dict[str, str]:
    value: object = values.get("envs") or {}
    if not isinstance(value, Mapping):
        wrong.append("envs: expected an object of texts")
        return {}
    envs: dict[str, str] = {}
    for key, text in cast("Mapping[object, object]", value).items():
        if not isinstance(key, str) or not _ENV_NAME.fullmatch(key):
            wrong.append(f"envs: {str(key)[:40]!r} is no name of an environment variable")
        elif not isinstance(text, str) or "\0" in text:
            wrong.append(f"envs.{key}: expected a text")
        elif key in RESERVED_ENVS or key.startswith(("AREAL_SKY_", "RAY_")):
            wrong.append(f"envs.{key}: is set by areal_sky for every rank")
        else:
            envs[key] = text
    return envs
