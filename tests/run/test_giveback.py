"""A machine is given back only where it is a Slurm job that SkyPilot made."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_sky.run.giveback import give_back

OURS = {"SLURM_JOB_ID": "42", "SKYPILOT_TASK_ID": "sky-1"}


def environ(tmp_path: Path, code: int, **more: str) -> dict[str, str]:
    scancel = tmp_path / "scancel"
    scancel.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/asked\nexit {code}\n')
    scancel.chmod(0o755)
    return {"PATH": f"{tmp_path}:/usr/bin:/bin", **more}


def test_the_whole_job_is_ended(tmp_path: Path) -> None:
    assert give_back(environ(tmp_path, 0, **OURS))
    assert (tmp_path / "asked").read_text() == "42\n"


@pytest.mark.parametrize("missing", ["SLURM_JOB_ID", "SKYPILOT_TASK_ID"])
def test_what_is_not_ours_is_left_alone(tmp_path: Path, missing: str) -> None:
    env = environ(tmp_path, 0, **{k: v for k, v in OURS.items() if k != missing})
    assert not give_back(env) and not (tmp_path / "asked").exists()


def test_without_slurm_or_when_it_refuses_nothing_breaks(tmp_path: Path) -> None:
    assert not give_back({"PATH": str(tmp_path), **OURS})
    assert not give_back(environ(tmp_path, 1, **OURS))
