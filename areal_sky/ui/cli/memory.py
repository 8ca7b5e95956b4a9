"""`areal-sky memory`: what a model takes per device, part by part, and the smallest parallelism that fits each GPU."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from areal_sky.core.architecture import Architecture
from areal_sky.core.memory import estimate, least
from areal_sky.core.memory_check import Level, judge, usable_gib
from areal_sky.core.memory_rollout import kv_bytes_per_token
from areal_sky.core.memory_terms import Estimate, ModelNeed, Stage, billions
from areal_sky.core.model import NodeShape
from areal_sky.core.model_table import known_models
from areal_sky.core.parallelism import smallest
from areal_sky.errors import InvalidInput
from areal_sky.run.modelfiles import architecture
from areal_sky.spec.accelerators import find, known_names
from areal_sky.spec.backends import ENGINES, Backend, parse_backend
from areal_sky.spec.fields import did_you_mean
from areal_sky.spec.memory import CHOICES, RANGES, Settings
from areal_sky.units import format_gib

if TYPE_CHECKING:
    from rich.console import RenderableType

GPUS = ("L40S", "A100-80GB", "H100", "H200", "B200")
WORDS = {
    Level.FITS: ("fits", "green"),
    Level.TIGHT: ("tight", "yellow"),
    Level.OVER: ("not as assumed", "red"),
    Level.IMPOSSIBLE: ("cannot fit", "bold red"),
}


@click.command(epilog=f"Settings: {', '.join((*CHOICES, *RANGES))}.")
@click.argument("model", required=False)
@click.option("--train", metavar="BACKEND", help="How it is trained, such as fsdp:d8 or megatron:d2p2t4e4.")
@click.option("--rollout", metavar="BACKEND", help="How it generates, such as sglang:d4t2 or vllm:d8.")
@click.option("--inference", metavar="BACKEND", help="How it computes as a reference or reward model, such as fsdp:d8.")
@click.option("--gpu", "gpus", multiple=True, metavar="NAME", help=f"Kinds of GPU; default: {', '.join(GPUS)}.")
@click.option("--set", "pairs", multiple=True, metavar="SETTING=VALUE", help="What the estimate assumes (see below).")
@click.option("--list", "list_models", is_flag=True, help="List the models known by name.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def memory(
    model: str | None, train: str | None, rollout: str | None, inference: str | None, gpus: tuple[str, ...],
    pairs: tuple[str, ...], list_models: bool, as_json: bool,
) -> None:  # fmt: skip
    """Show what MODEL takes of each GPU's memory, and on how few GPUs of each kind it would fit.

    MODEL is the name of a common model (`--list`) or the path of a Hugging Face config.json. Without a backend, only
    the smallest that fit are shown, for fsdp, megatron and sglang. An estimate, not a measurement: it names its
    sources.
    """
    if list_models:
        click.echo(json.dumps(known_models()) if as_json else "\n".join(known_models()))
        return
    if model is None:
        raise InvalidInput("memory: expected a MODEL: a common name (`--list`) or the path of a config.json")
    found, source = architecture(model, Path.cwd())
    settings = _settings(pairs)
    shapes = [_shape(name) for name in gpus or GPUS]
    asked: list[tuple[Stage, str]] = []
    stages: tuple[tuple[Stage, str | None], ...] = (("train", train), ("rollout", rollout), ("inference", inference))
    for stage, text in stages:
        if text is not None:
            asked.append((stage, text))
    engines: list[tuple[Stage, str]] = [(s, parse_backend(t, ENGINES).engine) for s, t in asked]
    engines = list(dict.fromkeys(engines)) or [("train", "fsdp"), ("train", "megatron"), ("rollout", "sglang")]
    made = [(estimate(found, s, t, settings), least(found, s, t, settings)) for s, t in asked]
    best = {
        (stage, engine): [smallest(found, stage, engine, usable_gib(s) or 0.0, settings) for s in shapes]
        for stage, engine in engines
    }
    if as_json:
        click.echo(json.dumps(_as_dict(found, source, settings, made, shapes, best), indent=2))
        return
    from rich.console import Console

    console = Console(highlight=False)
    for part in _story(found, source, settings, made, shapes, best):
        console.print(part)


def _settings(pairs: tuple[str, ...]) -> Settings:
    values: dict[str, Any] = {}
    known = tuple(f.name for f in fields(Settings))
    for pair in pairs:
        key, equals, text = pair.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or key not in known:
            raise InvalidInput(
                f"--set {pair[:60]}: expected SETTING=VALUE with one of {', '.join(known)}{did_you_mean(key, known)}"
            )
        values[key] = int(text) if key in RANGES and text.strip().isascii() and text.strip().isdigit() else text.strip()
    return Settings.of(values)


def _shape(name: str) -> NodeShape:
    gpu = find(name)
    if gpu is None or gpu.memory_gib is None:
        meant = did_you_mean(name, known_names())
        raise InvalidInput(f"--gpu {name[:40]}: no GPU of known memory has that name{meant}")
    return NodeShape(8, 1, 1, gpu.name, gpu.memory_gib)


def _need(e: Estimate, floor: Estimate) -> ModelNeed:
    return ModelNeed(e.model, e.stage, e.backend, e.gpus, e.gpus, e.device_gib, floor.device_gib, e.host_gib)


# ---------------------------------------------------------------- to be read


def _story(
    a: Architecture,
    source: str,
    s: Settings,
    made: list[tuple[Estimate, Estimate]],
    shapes: list[NodeShape],
    best: dict[tuple[Stage, str], list[Backend | None]],
) -> list[RenderableType]:
    from rich.text import Text

    out: list[RenderableType] = [Text(a.name, "bold"), Text(f"  {_described(a)}\n  from {source}", "dim")]
    sources: dict[str, int] = {}
    for e, floor in made:
        out += [Text(""), *_breakdown(a, e, floor, s, sources)]
    if sources:
        out += [Text(""), *(Text(f"[{n}] {text}", "dim") for text, n in sources.items())]
    out += [Text(""), _fits(made, shapes, best)]
    note = "Estimated; of a GPU's memory the part that programs see counts, with 8% kept free to call it a fit."
    out.append(Text(note, "dim"))
    return out


def _described(a: Architecture) -> str:
    words = f"{billions(a.parameters)} parameters"
    if a.is_moe:
        words += f" ({billions(a.active_parameters)} active), {a.active_experts} of {a.experts} experts a token"
    heads = f"latent attention of rank {a.latent.kv_rank}" if a.latent else f"{a.heads}/{a.kv_heads} heads"
    return f"{words}; {a.layers} layers, hidden {a.hidden}, {heads}, vocabulary {a.vocabulary:,}"


def _breakdown(
    a: Architecture, e: Estimate, floor: Estimate, s: Settings, sources: dict[str, int]
) -> list[RenderableType]:
    """One estimate as a table; its sources are numbered in `sources`."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    if e.stage == "rollout":
        assumed = f"{s.concurrent} sequences of {s.context:,} tokens at once, {s.weights} weights"
    else:
        assumed = f"{s.micro_batch_tokens:,} tokens a micro-batch"
        if e.stage == "train":
            assumed += f", LoRA of rank {s.lora_rank}" if s.lora_rank else f", {s.optimizer}"
            assumed += f", recompute {s.recompute}"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False, width=80)
    table.add_column("Per GPU", no_wrap=True)
    table.add_column("GiB", justify="right", no_wrap=True)
    table.add_column("How", overflow="fold")
    for p in e.parts:
        sources.setdefault(p.source, len(sources) + 1)
        table.add_row(p.name, f"{p.gib:.2f}", Text.assemble(p.how, (f" [{sources[p.source]}]", "dim")))
    table.add_section()
    lean = f"at the least {floor.device_gib:.1f}, with leaner settings"
    table.add_row("total", f"{e.device_gib:.2f}", lean, style="bold")
    host = f"{format_gib(round(e.host_gib, 1))} of host memory per GPU"
    if e.host_once_gib:
        host += f", and {format_gib(round(e.host_once_gib, 1))} once, where the whole model is gathered to be saved"
    lines = [Text(f"{e.stage} as {e.backend} on {e.gpus} GPU{'s' if e.gpus != 1 else ''}: {assumed}", "bold"), table]
    if e.stage == "rollout":
        per_token = kv_bytes_per_token(a, parse_backend(e.backend, ENGINES), s) / 1024
        host += f"; a token of KV cache takes {per_token:.4g} KiB a GPU"
    return [*lines, Text(host, "dim")]


def _fits(
    made: list[tuple[Estimate, Estimate]],
    shapes: list[NodeShape],
    best: dict[tuple[Stage, str], list[Backend | None]],
) -> RenderableType:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
    table.add_column("GPU", no_wrap=True)
    table.add_column("GiB", justify="right", no_wrap=True)
    for e, _ in made:
        table.add_column(e.backend, overflow="fold")
    for stage, engine in best:
        table.add_column(f"smallest {engine}" + (" (inference)" if stage == "inference" else ""), overflow="fold")
    for n, shape in enumerate(shapes):
        usable = usable_gib(shape) or 0.0
        verdicts = [Text(*WORDS[judge(_need(e, floor), usable)]) for e, floor in made]
        found = [b[n] for b in best.values()]
        table.add_row(
            shape.accelerator or "", f"{usable:.0f}", *verdicts,
            *(f"{b} ({b.gpus} GPU{'s' if b.gpus > 1 else ''})" if b else "none up to 1024" for b in found),
        )  # fmt: skip
    return table


def _as_dict(
    a: Architecture,
    source: str,
    s: Settings,
    made: list[tuple[Estimate, Estimate]],
    shapes: list[NodeShape],
    best: dict[tuple[Stage, str], list[Backend | None]],
) -> dict[str, Any]:
    return {
        "model": a.name,
        "source": source,
        "architecture": asdict(a),
        "parameters": a.parameters,
        "active_parameters": a.active_parameters,
        "settings": asdict(s),
        "estimates": [
            {
                **asdict(e),
                "device_gib": round(e.device_gib, 3),
                "least_gib": round(floor.device_gib, 3),
                "host_gib": round(e.host_gib, 3),
                "fits": {
                    str(shape.accelerator): judge(_need(e, floor), usable_gib(shape) or 0.0).name.lower()
                    for shape in shapes
                },
            }
            for e, floor in made
        ],
        "smallest": [
            {
                "stage": stage,
                "engine": engine,
                "gpu": shape.accelerator,
                "usable_gib": round(usable_gib(shape) or 0.0, 1),
                "backend": None if b is None else str(b),
                "gpus": None if b is None else b.gpus,
            }
            for (stage, engine), found in best.items()
            for shape, b in zip(shapes, found, strict=True)
        ],
    }
