"""Shared by all tests: never the user's own state folder or settings."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

# A slow machine is no failure: what must be quick is measured in benchmarks/.
settings.register_profile("areal_sky", deadline=None)
settings.load_profile("areal_sky")
_session_home = Path(tempfile.mkdtemp(prefix="areal_sky_tests_"))


def pytest_configure() -> None:
    """Before anything is imported: forget what an outer areal_sky, Ray or SkyPilot has set."""
    for name in list(os.environ):
        if name.startswith(("AREAL_SKY_", "RAY_", "SKYPILOT_")) and name != "AREAL_SKY_TESTBED":
            del os.environ[name]
    os.environ["AREAL_SKY_HOME"] = str(_session_home)
    os.environ["SKYPILOT_DISABLE_USAGE_COLLECTION"] = "1"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"


def pytest_unconfigure() -> None:
    shutil.rmtree(_session_home, ignore_errors=True)


@pytest.fixture
def private_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An AREAL_SKY_HOME of this test alone."""
    home = tmp_path / "areal_sky_home"
    monkeypatch.setenv("AREAL_SKY_HOME", str(home))
    return home


ENABLE = """
import sys
from sky import check, clouds, global_user_state as state, skypilot_config
workspace = skypilot_config.get_active_workspace()
state.set_enabled_clouds(sys.argv[1:], clouds.cloud.CloudCapability.COMPUTE, workspace)
state.set_allowed_clouds(check._get_workspace_allowed_clouds(workspace), workspace)
"""


@pytest.fixture(scope="session")
def sky_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A HOME where SkyPilot has aws, gcp and lambda enabled and the small true catalogs of `tests/catalogs`."""
    home = tmp_path_factory.mktemp("sky_home")
    shutil.copytree(Path(__file__).parent / "catalogs" / "v8", home / ".sky" / "catalogs" / "v8")
    argv = [sys.executable, "-c", ENABLE, "aws", "gcp", "lambda"]
    done = subprocess.run(
        argv, env=os.environ | {"HOME": str(home), "SKY_RUNTIME_DIR": str(home)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return home


@pytest.fixture(scope="session")
def free_port() -> Callable[[], int]:
    """A function that gives a TCP port free at the moment of the call, never the same twice."""
    given: set[int] = set()

    def pick() -> int:
        while True:
            with socket.socket() as s:
                s.bind(("127.0.0.1", 0))
                port = int(s.getsockname()[1])
            if port not in given:
                given.add(port)
                return port

    return pick
