"""The wheel that machines get: right for pip, whole, and the same bytes wherever the same code runs."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import subprocess
import sys
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from areal_sky.errors import StateError
from areal_sky.run import shipping

NO_NETWORK = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9", "PIP_NO_INPUT": "1"}


def python(*argv: str, path: Path | None = None, **env: str) -> str:
    """Of this interpreter, in a process that sees `path` first and no checkout."""
    seen = {**os.environ, **NO_NETWORK, **env, **({"PYTHONPATH": str(path)} if path else {})}
    done = subprocess.run([sys.executable, *argv], env=seen, cwd="/", capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_file_is_in_the_record_with_its_hash(private_home: Path) -> None:
    wheel = zipfile.ZipFile(shipping.wheel())
    assert wheel.testzip() is None
    record = next(n for n in wheel.namelist() if n.endswith("/RECORD"))
    rows = {name: (digest, size) for name, digest, size in csv.reader(io.StringIO(wheel.read(record).decode()))}
    assert sorted(rows) == sorted(wheel.namelist()) and rows.pop(record) == ("", "")
    for name, (digest, size) in rows.items():
        content = wheel.read(name)
        sha = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        assert (digest, size) == (f"sha256={sha}", str(len(content)))


def test_it_is_packed_once_and_its_name_does_not_change_with_the_code(
    private_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = shipping.wheel()
    assert first.is_relative_to(private_home / "wheels")
    assert first.name == f"areal_sky-{version('areal-sky')}-py3-none-any.whl"
    made = first.stat().st_mtime_ns
    assert shipping.wheel() == first and first.stat().st_mtime_ns == made
    monkeypatch.setattr(shipping, "_WHEEL", shipping._WHEEL + "Build: 2\n")  # as if a file had changed
    other = shipping.wheel()
    assert other.name == first.name and other.parent != first.parent and first.exists()


def test_pip_installs_it_without_index_and_it_packs_itself_again_from_there(private_home: Path, tmp_path: Path) -> None:
    """What lies in site-packages after pip gives the very same wheel: a checkout is not needed to ship."""
    wheel, site = shipping.wheel(), tmp_path / "site"
    offline = ("--quiet", "--no-deps", "--no-index", "--no-compile")
    python("-m", "pip", "install", *offline, "--target", str(site), str(wheel))
    code = "from areal_sky.run import shipping; from areal_sky import data; print(shipping.wheel(), data.__file__)"
    again, where = python("-c", code, path=site, AREAL_SKY_HOME=str(tmp_path / "other")).split()
    assert Path(where).is_relative_to(site)
    assert Path(again).read_bytes() == wheel.read_bytes()
    for name in ("policies", "task_yamls", "examples"):
        found = python("-c", f"from areal_sky.data import data_dir; print(data_dir({name!r}))", path=site).strip()
        assert Path(found).is_relative_to(site) and any(Path(found).iterdir())
    assert version("areal-sky") in python("-m", "areal_sky.ui.cli.main", "--version", path=site)


def test_what_is_no_code_stays_here(private_home: Path) -> None:
    names = zipfile.ZipFile(shipping.wheel()).namelist()
    assert not [n for n in names if "__pycache__" in n or n.endswith(".pyc") or n.startswith("tests")]
    assert "areal_sky/run/node.py" in names and "areal_sky/data/prices.csv" in names


def test_a_folder_that_is_not_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(shipping, "distribution", unknown)
    with pytest.raises(StateError, match="pip install -e"):
        shipping.wheel()


def test_a_disk_that_refuses_says_so(private_home: Path) -> None:
    private_home.mkdir()
    (private_home / "wheels").write_text("")
    with pytest.raises(StateError, match="cannot pack"):
        shipping.wheel()
