from __future__ import annotations

from pathlib import Path

import pytest

from tests.adapters.fakenvml import build, compiler


@pytest.fixture(scope="session")
def fake_nvml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a freshly built libnvidia-ml.so.1."""
    if compiler() is None:
        pytest.skip("needs a C compiler")
    return build(tmp_path_factory.mktemp("nvml"))
