"""Specs as they are kept on disk: secrets are taken out of the text, all else stays where it stood. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import yaml

from areal_sky.core.tasksources import MASK, is_secret_env

RARE = 8  # characters: shorter values are words that may well stand elsewhere, and no secrets worth the name


def masked(text: str) -> str:
    """The YAML with MASK for each value of `secrets` and each entry of `envs` that holds a secret.

    A text that is no YAML mapping comes back as it is: no cluster is made from it.
    """
    try:
        root: object = cast("Any", yaml).compose(text, yaml.SafeLoader)
    except yaml.YAMLError:
        return text
    if not isinstance(root, yaml.MappingNode):
        return text
    nodes = {node.start_mark.index: node for node in _secrets(root)}
    if not nodes:
        return text
    result = text
    for start, node in sorted(nodes.items(), reverse=True):
        end = "\n" if node.style in ("|", ">") else ""
        result = f'{result[:start]}"{MASK}"{end}{result[node.end_mark.index :]}'
    values = [node.value for node in nodes.values() if len(node.value) >= RARE]
    if _readable(result) and not any(v in result for v in values):
        return result
    return _rewritten(text)  # an anchor, or the value stands somewhere else too: what it looked like is lost


def _secrets(root: yaml.MappingNode) -> Iterator[yaml.ScalarNode]:
    for block, name, value in _entries(root):
        if not isinstance(value, yaml.ScalarNode) or value.tag == "tag:yaml.org,2002:null" or value.value == MASK:
            continue
        if block == "secrets" or is_secret_env(name, value.value):
            yield value


def _entries(root: yaml.MappingNode) -> Iterator[tuple[str, str, yaml.Node]]:
    for key, block in cast("list[tuple[yaml.Node, yaml.Node]]", root.value):
        if key.value in ("secrets", "envs") and isinstance(block, yaml.MappingNode):
            for name, value in cast("list[tuple[yaml.Node, yaml.Node]]", block.value):
                yield str(key.value), str(name.value), value


def _readable(text: str) -> bool:
    try:
        yaml.safe_load(text)
    except yaml.YAMLError:
        return False
    return True


def _rewritten(text: str) -> str:
    data = cast("dict[str, Any]", yaml.safe_load(text))
    hidden: list[str] = []
    for block in ("secrets", "envs"):
        entries = cast("dict[str, Any]", data.get(block) or {})
        for name, value in entries.items() if isinstance(data.get(block), dict) else ():
            if value is not None and (block == "secrets" or is_secret_env(str(name), str(value))):
                entries[name] = MASK
                hidden.append(str(value))
    return yaml.safe_dump(_without(data, [h for h in hidden if len(h) >= RARE]), sort_keys=False, allow_unicode=True)


def _without(value: Any, hidden: list[str]) -> Any:
    if isinstance(value, dict):
        return {k: _without(v, hidden) for k, v in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list):
        return [_without(v, hidden) for v in cast("list[Any]", value)]
    if isinstance(value, str):
        for h in hidden:
            value = value.replace(h, MASK)
    return value
