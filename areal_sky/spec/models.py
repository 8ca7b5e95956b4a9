"""The models that the runs train or serve, and what their memory estimates assume."""

from __future__ import annotations

from areal_sky.errors import InvalidInput
from areal_sky.spec.backends import ROLLOUT_ENGINES, TRAIN_ENGINES, parse_backend
from areal_sky.spec.cluster import ModelSpec
from areal_sky.spec.fields import Fields, did_you_mean, unique
from areal_sky.spec.marks import Node
from areal_sky.spec.memory import CHOICES, RANGES, Settings

BUILT_IN_MODEL_TYPES = ("moe", "base")
MEMORY_CHECKS = ("refuse", "warn", "skip")  # not `off`, which YAML reads as false


def read_models(top: Fields, known_types: tuple[str, ...]) -> tuple[ModelSpec, ...]:
    """`known_types` are those that `scheduling.priority` lists, beside moe and base."""
    models: list[ModelSpec] = []
    seen: dict[str, Node] = {}
    for path, item in top.items("models", "a list of models"):
        f = Fields(item, path, top.notes)
        f.hint({"type": "model_type", "backend": "train", "actor": "train", "inference": "rollout", "path": "config"})
        name = f.required_text("name", "a name for the model")
        model_type = f.text("model_type")
        config, train, rollout = f.text("config"), f.text("train"), f.text("rollout")
        memory, check = _read_memory(f)
        f.finish()
        unique(f, seen, name, "name", "the model name")
        check_model_type(f, "model_type", model_type, known_types)
        for key, text, engines in (("train", train, TRAIN_ENGINES), ("rollout", rollout, ROLLOUT_ENGINES)):
            if text is not None:
                try:
                    parse_backend(text, engines)
                except InvalidInput as e:
                    f.wrong(f.map.entries[key], f"{f.path(key)}: {e}")
        if name is not None:
            models.append(
                ModelSpec(
                    name=name, model_type=model_type or "base", config=config, train=train, rollout=rollout,
                    memory=memory, memory_check=check,
                )
            )
    return tuple(models)


def _read_memory(top: Fields) -> tuple[Settings, str]:
    """The `memory:` block: settings of the estimate, and `check`, what to do where it does not fit."""
    f = top.block("memory")
    f.hint({
        "tokens": "micro_batch_tokens", "max_tokens_per_mb": "micro_batch_tokens", "dtype": "weights",
        "gradient_checkpointing": "recompute", "lora": "lora_rank", "max_model_len": "context",
        "context_length": "context",
    })  # fmt: skip
    check = f.choice("check", MEMORY_CHECKS)
    values = {key: found for key, known in CHOICES.items() if (found := f.choice(key, known)) is not None}
    numbers = {key: found for key, (low, high) in RANGES.items() if (found := f.whole(key, low, high)) is not None}
    f.finish()
    return Settings.of({**values, **numbers}), check or MEMORY_CHECKS[0]


def check_model_type(f: Fields, key: str, model_type: str | None, known_types: tuple[str, ...]) -> None:
    """Notes a model type that neither is built in nor listed in `scheduling.priority`."""
    known = tuple(dict.fromkeys((*known_types, *BUILT_IN_MODEL_TYPES)))
    if model_type is not None and model_type not in known:
        f.wrong(
            f.map.entries[key],
            f"{f.path(key)} is `{model_type[:40]}`, which scheduling.priority does not list, "
            f"expected one of: {', '.join(known)}{did_you_mean(model_type, known)}",
        )
