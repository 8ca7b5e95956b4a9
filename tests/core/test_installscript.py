"""How a machine gets areal_sky: the bash run for real, with no network and with Pythons of several kinds."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import time
import venv
from pathlib import Path

import pytest

from areal_sky.core.installscript import RAY_VERSION, install_script
from areal_sky.run import shipping

ROOT = Path(__file__).resolve().parents[2]
OURS = Path(sysconfig.get_path("purelib"))  # has Ray and everything that areal_sky needs


class Machine:
    """A home folder, a PATH of its own, the wheel mounted, and no network."""

    def __init__(self, folder: Path):
        self.home = folder / "home"
        self.bin = folder / "bin"
        self.mounted = self.home / ".areal_sky" / "wheel" / shipping.wheel().name
        self.mounted.parent.mkdir(parents=True)
        self.bin.mkdir()
        self.mounted.write_bytes(shipping.wheel().read_bytes())
        self.path = f"{self.bin}:/usr/bin:/bin"

    def install(self, **env: str) -> subprocess.CompletedProcess[str]:
        seen = {
            "HOME": str(self.home), "PATH": self.path, "AREAL_SKY_PACKAGE": f"~/.areal_sky/wheel/{self.mounted.name}",
            "http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9", "PIP_RETRIES": "0",
        }  # fmt: skip
        return subprocess.run(
            ["bash", "-c", install_script()], env=seen | env, cwd=self.home, capture_output=True, text=True, timeout=120
        )

    def has(self, program: str, script: str) -> None:
        path = self.bin / program
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)

    def python(self, name: str, site: Path | None = OURS) -> Path:
        """A Python of the image that sees what `site` has: its executable, not on PATH."""
        folder = self.home.parent / name
        venv.create(folder, with_pip=False, symlinks=True)
        if site is not None:
            own = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
            (own / "site.pth").write_text(f"{site}\n")
        return folder / "bin" / "python3"

    @property
    def command(self) -> Path:
        return self.home / ".areal_sky" / "bin" / "areal-sky"

    @property
    def venv(self) -> Path:
        return self.command.resolve().parents[1]

    def sees(self, code: str) -> str:
        argv = [str(self.venv / "bin" / "python"), "-c", code]
        return subprocess.run(argv, cwd="/", capture_output=True, text=True, check=True, timeout=60).stdout.strip()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_shared_python_with_everything_needs_no_network_and_is_left_as_it_was(machine: Machine) -> None:
    base = machine.python("image")
    before = sorted(p for p in base.parents[1].rglob("*") if "__pycache__" not in p.parts)
    began_s = time.monotonic()
    done = machine.install(AREAL_SKY_PYTHON=str(base))
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began_s < 15  # 0.4 s on an idle machine
    assert sorted(p for p in base.parents[1].rglob("*") if "__pycache__" not in p.parts) == before
    assert machine.sees("import areal_sky; print(areal_sky.__file__)").startswith(f"{machine.venv}/lib")
    assert machine.sees("import ray; print(ray.__file__)").startswith(str(OURS))
    assert not (machine.venv / "apart").exists()
    for words in (("areal-sky", "--version"), ("ray", "--version")):
        subprocess.run([machine.venv / "bin" / words[0], *words[1:]], check=True, capture_output=True, timeout=60)

    marked = machine.venv / "marker"
    marked.touch()
    assert machine.install(AREAL_SKY_PYTHON=str(base)).returncode == 0 and marked.exists()  # the work is done already
    machine.mounted.write_bytes(machine.mounted.read_bytes() + b"another build")
    assert machine.install(AREAL_SKY_PYTHON=str(base)).returncode == 0 and not (machine.venv / "marker").exists()


@pytest.mark.parametrize("name", ["python3", "python", "ray"])
def test_the_machines_own_ray_is_found(machine: Machine, name: str) -> None:
    base = machine.python("image")
    if name == "ray":  # a tool's folder on PATH, as pipx makes it
        (machine.bin / "ray").write_text(f"#!{base}\nimport ray\n")
        (machine.bin / "ray").chmod(0o755)
    else:
        machine.has("python3", "exit 1")
        machine.has(name, f'exec {base} "$@"')
    done = machine.install()
    assert done.returncode == 0, done.stderr
    assert machine.sees("import ray; print(ray.__file__)").startswith(str(OURS))


def test_skypilots_own_runtime_is_no_base_however_good_it_looks(machine: Machine) -> None:
    runtime = machine.python("skypilot-runtime")
    machine.path = f"{runtime.parent}:{machine.path}"
    machine.has("uv", 'echo "$@" >> "$HOME/uv"; exit 1')
    assert machine.install().returncode != 0
    assert (machine.home / "uv").read_text().startswith("venv ")  # it went for a Python of its own


def test_without_a_ray_uv_makes_a_python_of_its_own(machine: Machine) -> None:
    """The double of uv gives what the real one would: a bare venv, and on `pip install` everything that is asked."""
    machine.has(
        "uv",
        f"""echo "$@" >> "$HOME/uv"
        if [ "$1" = venv ]; then exec {sys.executable} -m venv --without-pip "${{@: -1}}"; fi
        for site in "${{5%/bin/python}}"/lib/python*/site-packages; do echo {OURS} > "$site/given.pth"; done""",
    )
    done = machine.install()
    assert done.returncode == 0, done.stderr
    made, installed = (machine.home / "uv").read_text().splitlines()
    assert made.startswith("venv --quiet --python-preference only-managed --python 3.12 ")
    asked = installed.split(f"--python {machine.venv}/bin/python ")[1]
    assert f"ray=={RAY_VERSION}" in asked and "fastapi>=0.115" in asked
    assert not any(word in asked for word in ("skypilot", "boto3", "torch", "pytest"))
    assert (machine.venv / "apart").exists()


def test_a_missing_dependency_without_a_network_is_named_and_tried_again(machine: Machine, tmp_path: Path) -> None:
    partial = tmp_path / "partial"
    partial.mkdir()
    for entry in OURS.iterdir():
        if not entry.name.lower().startswith(("nvidia_ml_py", "httpx", "areal_sky", "_areal_sky", "__editable__")):
            (partial / entry.name).symlink_to(entry)
    base = machine.python("image", partial)
    done = machine.install(AREAL_SKY_PYTHON=str(base))
    assert done.returncode == 1
    assert "could not install httpx>=0.27 nvidia-ml-py>=12" in done.stderr
    assert not machine.command.exists()
    for entry in OURS.glob("nvidia_ml_py*"), OURS.glob("httpx*"), OURS.glob("pynvml*"):
        for found in entry:
            if not (partial / found.name).exists():
                (partial / found.name).symlink_to(found)
    assert machine.install(AREAL_SKY_PYTHON=str(base)).returncode == 0


def test_nodes_that_share_a_home_install_once(machine: Machine) -> None:
    """Two at a time: the second waits for the first one's lock and finds the work done."""
    base = str(machine.python("image"))
    env = {**os.environ, "HOME": str(machine.home), "AREAL_SKY_PYTHON": base, "AREAL_SKY_PACKAGE": str(machine.mounted)}
    both = [
        subprocess.Popen(["bash", "-c", install_script()], env=env, stderr=subprocess.PIPE, text=True) for _ in range(2)
    ]
    told = [p.communicate(timeout=120)[1] for p in both]
    assert [p.returncode for p in both] == [0, 0], told
    assert len(list((machine.home / ".areal_sky").glob("venv-*"))) == 1


def test_an_image_may_bring_its_own_areal_sky(machine: Machine) -> None:
    done = machine.install(AREAL_SKY_PACKAGE="")
    assert done.returncode == 1 and "this image has no areal-sky" in done.stderr
    machine.has("areal-sky", "true")
    assert machine.install(AREAL_SKY_PACKAGE="").returncode == 0
    assert not list((machine.home / ".areal_sky").glob("venv-*"))


@pytest.mark.parametrize(
    ("env", "told"),
    [
        ({"AREAL_SKY_PYTHON": "/nowhere/python3"}, "AREAL_SKY_PYTHON: no /nowhere/python3 here"),
        ({"AREAL_SKY_PACKAGE": "/nowhere/areal_sky-1.whl"}, "no /nowhere/areal_sky-1.whl; was it mounted?"),
    ],
)
def test_what_was_named_and_is_not_there_is_told(machine: Machine, env: dict[str, str], told: str) -> None:
    done = machine.install(**env)
    assert done.returncode == 1 and told in done.stderr


def test_the_pinned_ray_is_the_one_that_the_package_asks_for() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    major_minor = ".".join(RAY_VERSION.split(".")[:2])
    assert f'"ray>={major_minor},' in text
