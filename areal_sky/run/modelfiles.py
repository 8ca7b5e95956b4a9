"""The config.json files that a spec's models name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from areal_sky.core.architecture import Architecture, LatentAttention, from_hf_config
from areal_sky.core.model_table import find_model, is_known
from areal_sky.errors import InvalidInput
from areal_sky.spec.cluster import ClusterSpec

MAX_BYTES = 4 * 2**20


def architectures(spec: ClusterSpec, folder: Path) -> dict[str, Architecture]:
    """Of every model whose `config` is a file, by the model's name. Relative paths count from `folder`.

    A file that cannot be read is left out, and its model then not checked: the machines may have it, we need not.
    Raises InvalidInput for one that is there and wrong.
    """
    found: dict[str, Architecture] = {}
    for model in spec.models:
        if model.config is None or is_known(model.config):
            continue
        path = config_file(model.config, folder)
        if path is not None:
            found[model.name] = read_architecture(path)
    return found


def architecture(model: str, folder: Path) -> tuple[Architecture, str]:
    """A model by name or by the path of its config.json (or the folder with it), and where its numbers come from.

    Raises InvalidInput.
    """
    path = None if is_known(model) else config_file(model, folder)
    if path is not None:
        return read_architecture(path), str(path)
    known = find_model(model)
    return known.architecture, known.source


def config_file(text: str, folder: Path) -> Path | None:
    """The file that a `config` means, or None where there is none."""
    try:
        path = folder / Path(text).expanduser()
        path = path / "config.json" if path.is_dir() else path
        return path if path.is_file() else None
    except (OSError, ValueError, RuntimeError):  # a name too long, a NUL, an unknown home
        return None


def read_architecture(path: Path) -> Architecture:
    """Raises InvalidInput for a file that is no config.json of a language model."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise InvalidInput(f"{path}: more than {MAX_BYTES:,} bytes, expected a Hugging Face config.json")
        raw = json.loads(data)
    except OSError as e:
        raise InvalidInput(f"{path}: cannot be read ({e.strerror or e})") from None
    except (ValueError, RecursionError) as e:
        raise InvalidInput(f"{path}: no JSON ({str(e)[:80]}), expected a Hugging Face config.json") from None
    return from_hf_config(raw, path.parent.name if path.name == "config.json" else path.stem)


def from_dict(raw: dict[str, Any]) -> Architecture:
    """What `dataclasses.asdict` made of an architecture. Raises TypeError for anything else."""
    latent = raw.get("latent")
    return Architecture(**{**raw, "latent": LatentAttention(**latent) if latent else None})
