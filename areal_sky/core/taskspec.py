"""TaskSpec on the wire: checked when it comes in, every mistake told at once."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, Literal, cast

from areal_sky.core.model import Bundle
from areal_sky.core.taskmodel import BACKOFF_S, TaskSpec
from areal_sky.core.tenancy import driver_need
from areal_sky.errors import InvalidInput
from areal_sky.spec.tasks import DAY_S, IF_LATE, KINDS, MAX_ARRAY, MAX_BUNDLES, MAX_RETRIES, YEAR_S

MAX_COMMAND_BYTES = 100_000  # Linux takes no single argument above 128 KiB
MAX_PAYLOAD_BYTES = 8 * 2**20
MAX_AFTER = 1000  # an array of tasks counts as one
MAX_LABELS = 32
# Set by the runner for every rank; a task cannot have its own.
RESERVED_ENVS = frozenset(("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES"))
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_FIELDS = {f.name for f in fields(TaskSpec)}
_BUNDLE_FIELDS = {f.name for f in fields(Bundle)}
_DEFAULTS = tuple(
    (f.name, f.default_factory() if f.default_factory is not MISSING else f.default) for f in fields(TaskSpec)
)
_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_./-]{0,61}[A-Za-z0-9])?")


def task_spec_to_json(spec: TaskSpec) -> dict[str, Any]:
    """Plain JSON values, the bundle nested; what has its default is left out, so that rows stay short."""
    raw: dict[str, Any] = {}
    for name, default in _DEFAULTS:
        value = getattr(spec, name)
        if value != default:
            raw[name] = value
    bundle = spec.bundle
    raw["bundle"] = {"gpus": bundle.gpus, "cpus": bundle.cpus, "memory_gib": bundle.memory_gib}
    for name in ("envs", "labels"):
        if name in raw:
            raw[name] = dict(raw[name])
    for name in ("accelerators", "after"):
        if name in raw:
            raw[name] = list(raw[name])
    return raw


def task_spec_from_row(raw: Mapping[str, Any]) -> TaskSpec:
    """What `task_spec_to_json` made, as our own journal holds it: checked when it came in, not again.

    Raises TypeError, KeyError for what it did not make.
    """
    values = dict(raw)
    values["bundle"] = Bundle(**values["bundle"])
    for name in ("accelerators", "after"):
        if name in values:
            values[name] = tuple(values[name])
    return TaskSpec(**values)


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
        wrong.append("command: expected a shell command line (or a Python callable instead), exactly one of them")
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

    bundles = _whole(values, "bundles", 1, 1, MAX_BUNDLES, wrong)
    min_bundles = _optional_whole(values, "min_bundles", 1, MAX_BUNDLES, wrong)
    if min_bundles is not None and min_bundles > bundles:
        wrong.append(f"min_bundles: {min_bundles} is above bundles {bundles}")
    if_late = _text(values, "if_late", "warn", wrong)
    if if_late not in IF_LATE:
        wrong.append(f"if_late: {if_late[:40]!r} is neither warn nor refuse")
    preemptible = values.get("preemptible")
    if preemptible is not None and not isinstance(preemptible, bool):
        wrong.append("preemptible: expected true or false")

    spec = TaskSpec(
        kind=kind,
        command=command,
        payload=payload,
        name=name,
        model=_optional_text(values, "model", wrong),
        model_type=_optional_text(values, "model_type", wrong),
        bundles=bundles,
        bundle=Bundle(gpus, cpus, memory_gib),
        priority=_number(values, "priority", 5.0, 0, 100, wrong),
        group=_optional_text(values, "group", wrong),
        accelerators=_names(values, "accelerators", wrong),
        envs=_envs(values, wrong),
        max_retries=_whole(values, "max_retries", 0, 0, MAX_RETRIES, wrong),
        deadline_s=_optional_number(values, "deadline_s", wrong),
        submit_key=_optional_text(values, "submit_key", wrong),
        min_bundles=min_bundles,
        preemptible=preemptible,
        estimate_s=_optional_number(values, "estimate_s", wrong),
        if_late=cast("Literal['warn', 'refuse']", if_late),
        after=_names(values, "after", wrong, MAX_AFTER),
        backoff_s=_number(values, "backoff_s", BACKOFF_S, 0, DAY_S, wrong),
        timeout_s=_optional_number(values, "timeout_s", wrong, 1, YEAR_S),
        total_timeout_s=_optional_number(values, "total_timeout_s", wrong, 1, YEAR_S),
        labels=_labels(values, wrong),
        array=_optional_whole(values, "array", 1, MAX_ARRAY, wrong),
        array_index=_optional_whole(values, "array_index", 0, MAX_ARRAY - 1, wrong),
        backends=_optional_text(values, "backends", wrong),
    )
    wrong += wrong_backends(spec)
    if wrong:
        raise InvalidInput("\n".join(wrong))
    return spec


def wrong_backends(spec: TaskSpec) -> list[str]:
    """What is wrong with a driver's `backends`."""
    if spec.backends is None:
        return []
    wrong: list[str] = []
    if spec.kind != "driver":
        wrong.append(f"backends: only a task of kind driver makes placement groups of its own, not {spec.kind}")
    if spec.bundles != 1 or spec.bundle.gpus or spec.min_bundles is not None:
        wrong.append("backends: they say which GPUs the run takes; the driver itself is one bundle without GPUs")
    try:
        driver_need(spec.backends)
    except InvalidInput as e:
        wrong.append(f"backends: {e}")
    return wrong


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


def _optional_number(
    values: Mapping[str, Any], key: str, wrong: list[str], low: float = 0, high: float = 1e12
) -> float | None:
    return None if values.get(key) is None else _number(values, key, low, low, high, wrong)


def _optional_whole(values: Mapping[str, Any], key: str, low: int, high: int, wrong: list[str]) -> int | None:
    return None if values.get(key) is None else _whole(values, key, low, low, high, wrong)


def _names(values: Mapping[str, Any], key: str, wrong: list[str], most: int = 100) -> tuple[str, ...]:
    value: object = values.get(key) or ()
    if isinstance(value, list | tuple):
        items = cast("list[object]", list(cast("Any", value)))
        if len(items) <= most and all(isinstance(x, str) and x for x in items):
            return tuple(str(x) for x in items)
    wrong.append(f"{key}: expected a list of names (at most {most})")
    return ()


def _labels(values: Mapping[str, Any], wrong: list[str]) -> dict[str, str]:
    value: object = values.get("labels") or {}
    if not isinstance(value, Mapping) or len(cast("Mapping[Any, Any]", value)) > MAX_LABELS:
        wrong.append(f"labels: expected at most {MAX_LABELS} texts by name")
        return {}
    labels: dict[str, str] = {}
    for key, text in cast("Mapping[object, object]", value).items():
        if not isinstance(key, str) or not _LABEL.fullmatch(key):
            wrong.append(f"labels: {str(key)[:40]!r} is no label: letters, digits and -_./ within, at most 63")
        elif not isinstance(text, str) or len(text) > 128 or not (text.isprintable() or not text):
            wrong.append(f"labels.{key}: expected a text of at most 128 printable characters")
        else:
            labels[key] = text
    return labels


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
