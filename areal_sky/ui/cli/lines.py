"""Lines for people: wrapped to the terminal, left whole when they go to a file or another program."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap

import click


def echo_line(text: str, lead: str = "", err: bool = False) -> None:
    """Prints `lead` (a time, an id) and `text`; further lines are indented under the text.

    Wraps at the terminal's width, or at COLUMNS where there is no terminal but that is set.
    """
    stream = sys.stderr if err else sys.stdout
    if stream.isatty() or "COLUMNS" in os.environ:
        width = max(40, shutil.get_terminal_size().columns)
        text = textwrap.fill(
            text, width, initial_indent=lead, subsequent_indent=" " * len(lead), break_on_hyphens=False
        )
    else:
        text = lead + text
    click.echo(text, err=err)


def echo_command(text: str) -> None:
    """Shows a command as one would type it, on several lines where one of 80 columns is not enough."""
    text = re.sub(r"( --?[\w-]+) (?=[^-$\s])", "\\1\u00a0", text)  # an option stays with its value
    lines = textwrap.wrap(text, 76, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    click.secho("$ " + " \\\n".join(lines).replace("\u00a0", " "), fg="cyan")
