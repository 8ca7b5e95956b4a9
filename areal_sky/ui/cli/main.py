"""The `areal-sky` command. Commands load lazily: `areal-sky --help` imports neither ray nor sky nor pydantic."""

from __future__ import annotations

import importlib
import os
import sys

import click

from areal_sky.errors import ArealSkyError

# command -> (module, attribute, one-line help). Listed here so that --help need not import them.
COMMANDS: dict[str, tuple[str, str]] = {
    "check": ("areal_sky.ui.cli.check:check", "Check spec files; print every mistake at once."),
    "plan": ("areal_sky.ui.cli.plan:plan", "Show what would be launched, where and at what price."),
    "memory": ("areal_sky.ui.cli.memory:memory", "What a model takes of a GPU's memory, part by part."),
    "render": ("areal_sky.ui.cli.plan:render", "Write the SkyPilot task YAMLs of a spec."),
    "up": ("areal_sky.ui.cli.cluster:up", "Bring a cluster up, or its spec up to date."),
    "status": ("areal_sky.ui.cli.cluster:status", "Show clusters, groups and replicas."),
    "scale": ("areal_sky.ui.cli.cluster:scale", "Grow or shrink a group: GROUP=N, GROUP=+N, GROUP=-N."),
    "down": ("areal_sky.ui.cli.cluster:down", "Drain and end a cluster; check that nothing is left."),
    "submit": ("areal_sky.ui.cli.submit:submit", "Queue a task."),
    "queue": ("areal_sky.ui.cli.tasks:queue", "Show waiting and running tasks in order."),
    "cancel": ("areal_sky.ui.cli.tasks:cancel", "Cancel tasks."),
    "logs": ("areal_sky.ui.cli.tasks:logs", "Print a task's output."),
    "top": ("areal_sky.ui.cli.top:top", "Live GPUs."),
    "why": ("areal_sky.ui.cli.story:why", "The story of a task, replica or group."),
    "events": ("areal_sky.ui.cli.story:events", "What happened, in order."),
    "alerts": ("areal_sky.ui.cli.alerts:alerts", "What is wrong, since when, and what was done about it."),
    "cost": ("areal_sky.ui.cli.cost:cost", "The bill so far, by group, role, replica or task."),
    "simulate": ("areal_sky.ui.cli.simulate:simulate", "Run a spec in a virtual world; compare policies."),
    "demo": ("areal_sky.ui.cli.demo:demo", "The whole loop on this machine in about a minute."),
}
HIDDEN: dict[str, str] = {
    "controller": "areal_sky.ui.cli.processes:controller",
    "head": "areal_sky.ui.cli.processes:head",
    "node": "areal_sky.ui.cli.processes:node",
}


class LazyGroup(click.Group):
    """Lists commands from the table above; imports one only when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        target = COMMANDS[cmd_name][0] if cmd_name in COMMANDS else HIDDEN.get(cmd_name)
        if target is None:
            return None
        module, _, attribute = target.partition(":")
        return getattr(importlib.import_module(module), attribute)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="areal-sky")
def cli() -> None:
    """Elastic, cost-aware Ray clusters for RL of large language models."""


def main() -> None:
    """Entry point: errors of ours end as one message and their exit code, never as a traceback."""
    try:
        cli(standalone_mode=False)
    except click.exceptions.Abort:
        click.echo("interrupted; nothing is lost: run the command again to go on", err=True)
        sys.exit(130)
    except click.ClickException as e:
        e.show()
        sys.exit(2)
    except click.exceptions.Exit as e:
        sys.exit(e.exit_code)
    except ArealSkyError as e:
        click.echo(f"error: {e}" if e.exit_code != 2 else str(e), err=True)
        sys.exit(e.exit_code)
    except BrokenPipeError:
        sys.stderr.close()  # else Python complains about the pipe once more at exit
        sys.exit(0)
    except Exception as e:
        if os.environ.get("AREAL_SKY_DEBUG"):
            raise
        click.echo(f"internal error: {type(e).__name__}: {e}", err=True)
        click.echo("this is a fault of areal_sky; AREAL_SKY_DEBUG=1 shows where it happened", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
