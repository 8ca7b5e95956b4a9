"""SkyPilot's `resources` block: what one node must have, in every form that SkyPilot takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from areal_sky.errors import InvalidInput
from areal_sky.spec.accelerators import ASK_GRAMMAR, parse_ask
from areal_sky.spec.cluster import AcceleratorAsk, ResourcesSpec
from areal_sky.spec.fields import Fields, did_you_mean, is_null, number_of, show
from areal_sky.spec.infra import LOCAL, check_infra, owns_machines
from areal_sky.spec.marks import ListNode, MapNode, Node, Notes, ScalarNode, plain
from areal_sky.spec.skypilot_keys import RESOURCES_KEYS, TYPE_WORDS
from areal_sky.units import SIZE_GRAMMAR, parse_gib

# Giving one of these drops all of them that were inherited: they answer the same question.
_CHOICE = ("accelerators", "gpus", "any_of", "ordered", "instance_type", "accelerator_args")
_PLACE = ("infra", "cloud", "region", "zone")
# What the head inherits from the default resources: where it runs and how it is labelled, not what it is.
_HEAD_INHERITS = (*_PLACE, "labels", "disk_tier", "network_tier")

# What people call these keys.
_MEANT = {
    "gpu": "accelerators", "accelerator": "accelerators", "spot": "use_spot", "cpu": "cpus", "vcpus": "cpus",
    "mem": "memory", "ram": "memory", "instance": "instance_type", "image": "image_id", "docker": "image_id",
    "disk": "disk_size",
}  # fmt: skip
_DISK_TIERS = ("low", "medium", "high", "ultra", "best", "none")
_NETWORK_TIERS = ("standard", "best")


def inherit(base: Node | None, own: Node | None) -> Node | None:
    """`own` resources over the default ones. A choice or a place in `own` replaces the inherited one as a whole."""
    if not isinstance(base, MapNode) or not isinstance(own, MapNode):
        return own if own is not None else base
    dropped = {k for together in (_CHOICE, _PLACE) if any(k in own.entries for k in together) for k in together}
    both = MapNode(own.line, own.column)
    for source, skip in ((base, dropped | own.entries.keys()), (own, set[str]())):
        for key, value in source.entries.items():
            if key not in skip:
                both.entries[key], both.keys[key] = value, source.keys[key]
    return both


def head_defaults(base: Node | None) -> Node | None:
    """The part of the default resources that the head takes over."""
    if not isinstance(base, MapNode):
        return None
    kept = MapNode(base.line, base.column)
    for key in base.entries:
        if key in _HEAD_INHERITS:
            kept.entries[key], kept.keys[key] = base.entries[key], base.keys[key]
    return kept


def read_resources(
    node: Node | None, where: str, notes: Notes, infra: str | None, entry: bool = False
) -> ResourcesSpec:
    """Reads one `resources` mapping. `infra` is the cluster's; `entry`: it is an item of `any_of` or `ordered`."""
    f = Fields(node, where, notes)
    f.hint(_MEANT)
    for key, letters in RESOURCES_KEYS.items():
        if not (entry and key in ("any_of", "ordered")):
            _check_type(f, key, letters)
    f.finish()
    f.taken.clear()
    place = _place(f)
    home = place or infra
    own = _asks(f, owns_machines(home))
    entries = {} if entry else {key: _entries(f, key, notes, home) for key in ("any_of", "ordered")}
    if entry and place == LOCAL:
        f.wrong(f.key_at("infra"), "`local` is for the whole cluster, expected `infra: local` at the top")
    _check_together(f, own)
    asks = [
        a if spec.infra is None else replace(a, infra=spec.infra)
        for specs in entries.values()
        for spec in specs
        for a in spec.accelerators or own
    ] or own
    _choice_of(f, "disk_tier", _DISK_TIERS)
    _choice_of(f, "network_tier", _NETWORK_TIERS)
    cpus = _cpus(f)
    disk_gib = _size(f, "disk_size")
    use_spot, instance, image = (f.map.entries.get(k) for k in ("use_spot", "instance_type", "image_id"))
    return ResourcesSpec(
        accelerators=tuple(dict.fromkeys(asks)),
        ordered=f.has("ordered") or list_form(f),
        cpus=cpus,
        memory_gib=_memory(f, cpus),
        use_spot=_value(use_spot, bool),
        infra=place,
        instance_type=_value(instance, str),
        image_id=_value(image, str),
        disk_size_gib=None if disk_gib is None else int(disk_gib),
        raw=_raw(f, own, entries),
    )


def list_form(f: Fields) -> bool:
    """True where `accelerators` is a list, whose order is the user's preference."""
    return isinstance(f.map.entries.get("accelerators", f.map.entries.get("gpus")), ListNode)


# ---------------------------------------------------------------- accelerators


def _asks(f: Fields, any_name: bool) -> tuple[AcceleratorAsk, ...]:
    key = "gpus" if f.has("gpus") else "accelerators"
    node = f.take(key)
    path = f.path(key)
    if node is None:
        return ()
    if isinstance(node, ScalarNode):
        return _ask(f, node, path, node.text, None, any_name)
    asks: list[AcceleratorAsk] = []
    if isinstance(node, ListNode):
        for i, item in enumerate(node.items):
            if isinstance(item, ScalarNode):
                asks += _ask(f, item, f"{path}[{i}]", item.text, None, any_name)
            else:
                f.wrong(
                    item,
                    f"{path}[{i}] is {show(item)}, expected {ASK_GRAMMAR} (SkyPilot takes only text in this "
                    "list; whole resources go under `any_of` or `ordered`)",
                )
    elif isinstance(node, MapNode):
        for name, value in node.entries.items():
            at = node.keys[name]
            count = number_of(value)
            if count is not None:
                asks += _ask(f, at, path, name, count, any_name)
            elif isinstance(value, ScalarNode) and value.value is None:  # {V100:8, H100:8} reads as null-valued keys
                asks += _ask(f, at, path, name, None, any_name)
            else:
                f.wrong(value, f"{path}.{name} is {show(value)}, expected a count: a number without quotes")
    if not node.items if isinstance(node, ListNode) else isinstance(node, MapNode) and not node.entries:
        f.wrong(node, f"{path} is empty, expected {ASK_GRAMMAR}")
    return tuple(asks)


def _ask(f: Fields, at: Node, path: str, text: str, count: float | None, any_name: bool) -> tuple[AcceleratorAsk, ...]:
    if isinstance(at, ScalarNode) and not isinstance(at.value, str):
        f.wrong(at, f"{path} is {show(at)}, expected {ASK_GRAMMAR}")
        return ()
    try:
        return (parse_ask(text, count, any_name),)
    except InvalidInput as e:
        f.wrong(at, f"{path}: {e}")
        return ()


def _entries(f: Fields, key: str, notes: Notes, infra: str | None) -> list[ResourcesSpec]:
    return [read_resources(item, path, notes, infra, entry=True) for path, item in f.items(key, "a list of resources")]


# ---------------------------------------------------------------- the rest


def _check_together(f: Fields, own: tuple[AcceleratorAsk, ...]) -> None:
    """Keys that contradict one another; SkyPilot refuses the same pairs."""
    for first, second in (("accelerators", "gpus"), ("any_of", "ordered")):
        if f.has(first) and f.has(second):
            f.wrong(f.key_at(second), f"both `{first}` and `{second}` in {f.where}, expected one of them")
    if f.has("ordered") and len(own) > 1:
        f.wrong(
            f.key_at("ordered"), f"several accelerators beside `ordered` in {f.where}, expected them in its entries"
        )
    if f.has("any_of") and len(own) > 1 and list_form(f):
        f.wrong(
            f.key_at("any_of"),
            f"a list of accelerators (by preference) beside `any_of` (the cheapest) in {f.where}, expected one of them",
        )


def _check_type(f: Fields, key: str, letters: str) -> None:
    node = f.take(key)
    if key in ("accelerators", "gpus"):  # `_asks` says more
        return
    if node is not None and not has_type(node, letters):
        words = " or ".join(TYPE_WORDS[letter] for letter in letters)
        quote = f': write "{node.text}"' if isinstance(node, ScalarNode) and letters[0] == "t" else ""
        f.wrong(node, f"{f.path(key)} is {show(node)}, expected {words}{quote}")


def has_type(node: Node, letters: str) -> bool:
    """Is the node of one of the types of `skypilot_keys`?"""
    if isinstance(node, MapNode):
        return "m" in letters
    if not isinstance(node, ScalarNode):
        return "l" in letters
    if isinstance(node.value, bool):
        return "b" in letters
    if isinstance(node.value, int):
        return "i" in letters or "n" in letters
    return ("n" if isinstance(node.value, float) else "t") in letters


def _place(f: Fields) -> str | None:
    """One infra string from `infra`, or from `cloud`, `region` and `zone`."""
    infra = f.map.entries.get("infra")
    apart = [k for k in ("cloud", "region", "zone") if f.has(k)]
    if f.has("infra") and apart:
        f.wrong(
            f.key_at(apart[0]), f"`{apart[0]}` beside `infra` in {f.where}, expected infra: cloud/region/zone alone"
        )
        return None
    if isinstance(infra, ScalarNode) and isinstance(infra.value, str):
        return checked_infra(f, "infra", infra)
    parts = [_value(f.map.entries.get(k), str) for k in ("cloud", "region", "zone")]
    if not any(parts):
        return None
    joined = "/".join(p or "*" for p in parts).rstrip("/*")
    return checked_infra(f, apart[0], f.map.entries[apart[0]], joined) if apart else None


def checked_infra(f: Fields, key: str, node: Node, text: str | None = None) -> str | None:
    """The infra string that `node` holds (or `text`), or None with a note."""
    try:
        return check_infra(text or (node.text if isinstance(node, ScalarNode) else ""))
    except InvalidInput as e:
        f.wrong(node, f"{f.path(key)}: {e}")
        return None


def _cpus(f: Fields) -> float | None:
    node = f.map.entries.get("cpus")
    if not isinstance(node, ScalarNode) or node.value is None or isinstance(node.value, bool):
        return None
    try:
        value = float(node.text.removesuffix("+")) if "_" not in node.text else -1.0
    except ValueError:
        value = -1.0
    if not 0 < value < 1e6:
        f.wrong(node, f"{f.path('cpus')} is {show(node)}, expected a number above 0, or at least one: 8+")
        return None
    return value


def _memory(f: Fields, cpus: float | None) -> float | None:
    """GiB. SkyPilot's `4x` is four GiB per CPU."""
    node = f.map.entries.get("memory")
    if not isinstance(node, ScalarNode) or node.value is None or isinstance(node.value, bool):
        return None
    per_cpu = node.text.endswith("x")
    try:
        value = parse_gib(node.text[:-1] if per_cpu else node.text.removesuffix("+"))
    except InvalidInput:
        value = 0.0
    if not 0 < value < 1e9:
        f.wrong(node, f"{f.path('memory')} is {show(node)}, expected {SIZE_GRAMMAR}, or at least one: 32+")
        return None
    return value if not per_cpu else None if cpus is None else value * cpus


def _size(f: Fields, key: str) -> float | None:
    node = f.map.entries.get(key)
    if not isinstance(node, ScalarNode) or node.value is None or not has_type(node, "ti"):
        return None
    try:
        value = parse_gib(node.text)
    except InvalidInput:
        value = 0.0
    if value < 1 or value != int(value):
        f.wrong(node, f"{f.path(key)} is {show(node)}, expected a whole number of GB, such as 256 or 256GB")
        return None
    return value


def _choice_of(f: Fields, key: str, choices: tuple[str, ...]) -> None:
    node = f.map.entries.get(key)
    if isinstance(node, ScalarNode) and isinstance(node.value, str) and node.text.lower() not in choices:
        f.wrong(
            node,
            f"{f.path(key)} is {show(node)}, expected one of: {', '.join(choices)}{did_you_mean(node.text, choices)}",
        )


def _value(node: Node | None, kind: type) -> Any:
    return node.value if isinstance(node, ScalarNode) and isinstance(node.value, kind) else None


def _raw(f: Fields, asks: tuple[AcceleratorAsk, ...], entries: dict[str, list[ResourcesSpec]]) -> dict[str, Any]:
    """As written, but: `gpus` is `accelerators`, TPUs bear SkyPilot's names, and `local`, which is ours, is gone."""
    given = {key: plain(value) for key, value in f.map.entries.items() if not is_null(value)}
    raw = {("accelerators" if key == "gpus" else key): value for key, value in given.items()}
    if raw.get("infra") == LOCAL:
        del raw["infra"]
    if any(a.name is not None and a.name.startswith("tpu-") for a in asks):
        named = {str(a.name): a.count for a in asks}
        raw["accelerators"] = [f"{n}:{c:g}" for n, c in named.items()] if list_form(f) else named
    return raw | {key: [e.raw for e in specs] for key, specs in entries.items() if specs}
