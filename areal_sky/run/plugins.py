"""Policies by name: a preset of `policies/`, a built-in, or `module:function` of the user's own."""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

from areal_sky.core import order_policies
from areal_sky.core.queueing import OrderPolicy
from areal_sky.core.scaling import Policy
from areal_sky.core.scaling_policies import BUILT_IN
from areal_sky.data import data_dir
from areal_sky.errors import InvalidInput
from areal_sky.spec.cluster import ScalingSpec, SchedulingSpec

WHERE = "scaling.policy"
ORDER = "scheduling.strategy"


def scaling_policy(spec: ScalingSpec, folder: Path | None = None) -> Policy:
    """The policy that the spec names, with the preset's numbers and over them `scaling.options`.

    A preset goes before a built-in of the same name. `folder` is where the spec lies. Raises InvalidInput: no such
    policy, an option that it does not know, a function that cannot be imported or called with one context.
    """
    kind, numbers = spec.policy, dict[str, Any]()
    if ":" not in kind and (preset := _preset_file("scaling", kind)):
        kind, numbers = _read_preset(preset, WHERE)
    options = {**numbers, **spec.options}
    if ":" in kind:
        return _own(kind, options, folder)
    factory = BUILT_IN.get(kind)
    if factory is None:
        raise InvalidInput(f"{WHERE}: there is no policy {kind!r}{_hint(kind, policy_names())}")
    try:
        return factory(options)
    except ValueError as e:
        raise InvalidInput(f"{WHERE} {spec.policy}: {e}") from None


def policy_names() -> tuple[str, ...]:
    """Every name that `scaling.policy` may have besides `module:function`."""
    return _names("scaling", BUILT_IN)


def order_policy(spec: SchedulingSpec, folder: Path | None = None) -> OrderPolicy:
    """The order that the spec names, with the preset's numbers; `module:function` is called and returns one.

    `folder` is where the spec lies. Raises InvalidInput: no such strategy, numbers it does not take, something that
    is no order.
    """
    kind, numbers = spec.strategy, dict[str, Any]()
    if ":" in kind:
        made = load_function(kind, ORDER, folder)
        try:
            order = made()
        except Exception as e:  # whatever the user's function raises
            raise InvalidInput(f"{ORDER}: {kind}() raised {type(e).__name__}: {e}") from None
        if missing := [m for m in ("key", "standing", "may_preempt") if not callable(getattr(order, m, None))]:
            raise InvalidInput(f"{ORDER}: what {kind}() returns is no order: it has no {', '.join(missing)}")
        return cast(OrderPolicy, order)
    if preset := _preset_file("scheduling", kind):
        kind, numbers = _read_preset(preset, ORDER)
    factory = order_policies.BUILT_IN.get(kind)
    if factory is None:
        raise InvalidInput(f"{ORDER}: there is no strategy {kind!r}{_hint(kind, strategy_names())}")
    try:
        return factory(numbers, spec.ageing_per_hour)
    except ValueError as e:
        raise InvalidInput(f"{ORDER} {spec.strategy}: {e}") from None


def strategy_names() -> tuple[str, ...]:
    """Every name that `scheduling.strategy` may have besides `module:function`."""
    return _names("scheduling", order_policies.BUILT_IN)


def load_function(reference: str, where: str, folder: Path | None = None) -> Callable[..., Any]:
    """What `module:function` points at; modules are also looked for in `folder`. Raises InvalidInput."""
    module_name, _, attribute = reference.partition(":")
    if not module_name or not attribute:
        raise InvalidInput(f"{where}: {reference!r} must read module:function")
    if folder is not None and str(folder) not in sys.path:
        sys.path.append(str(folder))
    try:
        target: Any = importlib.import_module(module_name)
    except Exception as e:  # whatever the user's module raises while it is imported
        raise InvalidInput(f"{where}: cannot import {module_name!r}: {type(e).__name__}: {e}") from None
    for part in attribute.split("."):
        if not hasattr(target, part):
            near = difflib.get_close_matches(part, dir(target), n=1)
            hint = f"; did you mean `{near[0]}`?" if near else ""
            raise InvalidInput(f"{where}: {module_name!r} has no {attribute!r}{hint}")
        target = getattr(target, part)
    if not callable(target):
        raise InvalidInput(f"{where}: {reference!r} is a {type(target).__name__}, not a function")
    return cast("Callable[..., Any]", target)


def _own(reference: str, options: Mapping[str, Any], folder: Path | None) -> Policy:
    function = load_function(reference, WHERE, folder)
    try:
        inspect.signature(function).bind(None, **options)
    except TypeError as e:
        given = ", ".join(["context", *(f"{o}=" for o in options)])
        raise InvalidInput(f"{WHERE}: {reference} cannot be called with ({given}): {e}") from None
    except ValueError:
        pass  # a callable of C without a signature: calling it will tell
    return cast(Policy, partial(function, **options) if options else function)


def _names(kind: str, built_in: Iterable[str]) -> tuple[str, ...]:
    presets = {p.stem for p in (data_dir("policies") / kind).glob("*.yaml")}
    return tuple(sorted(presets | set(built_in)))


def _preset_file(folder: str, name: str) -> Path | None:
    path = data_dir("policies") / folder / f"{name}.yaml"
    return path if "/" not in name and path.is_file() else None


def _read_preset(path: Path, where: str) -> tuple[str, dict[str, Any]]:
    import yaml

    try:
        raw: Any = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as e:
        raise InvalidInput(f"{where}: cannot read the preset {path}: {e}") from None
    if not isinstance(raw, dict) or "kind" not in raw:
        raise InvalidInput(f"{where}: the preset {path} must be a mapping with a `kind`")
    numbers = cast("dict[str, Any]", raw)
    return numbers.pop("kind"), numbers


def _hint(name: str, names: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean `{near[0]}`?" if near else f"; known are {', '.join(names)}, or module:function"
