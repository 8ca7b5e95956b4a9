"""Lines for people: wrapped where people look, whole where programs do; commands can be pasted back into a shell."""

from __future__ import annotations

import shlex

import click
import pytest

from areal_sky.ui.cli.lines import echo_command, echo_line

LONG = "rollout: 3 wanted by policy: t5 and 1 more task waiting: needs 2 replicas more; t4 would not fit below 3"


def test_a_line_wraps_under_its_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    echo_line(LONG, lead="  9 s  ")
    first, *more = capsys.readouterr().out.splitlines()
    assert first.startswith("  9 s  rollout") and more and all(x.startswith(" " * 7) for x in more)
    assert max(len(x) for x in (first, *more)) <= 60
    assert " ".join([first.removeprefix("  9 s  "), *(x.strip() for x in more)]) == LONG


def test_a_line_for_a_program_stays_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    echo_line(LONG, lead="  9 s  ")
    assert capsys.readouterr().out == f"  9 s  {LONG}\n"


def test_a_shown_command_means_the_same_in_a_shell(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["areal-sky", "submit", "-c", "demo", "--name", "train-moe", "--kind", "train", "--model", "tiny-moe"]
    words += ["--group", "trainer", "--bundles", "2", "--gpus", "1", "--", "python", "train.py", "--lr", "1e-4"]
    echo_command(shlex.join(words))
    shown = click.unstyle(capsys.readouterr().out)
    assert len(shown.splitlines()) > 1 and max(map(len, shown.splitlines())) <= 80
    # The shell joins lines that end in a backslash.
    assert shlex.split(shown.removeprefix("$ ").replace("\\\n", "")) == words
