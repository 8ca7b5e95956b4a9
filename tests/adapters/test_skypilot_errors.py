"""SkyPilot's exceptions, made as it makes them, become what the caller can do about them."""

from __future__ import annotations

from typing import Any

import pytest

from areal_sky.adapters.skypilot.errors import TABLE, translate
from areal_sky.errors import (
    AlreadyExists,
    ArealSkyError,
    NoCapacity,
    NotFound,
    QuotaExceeded,
    Refused,
    Unauthorized,
    Unreachable,
)

pytestmark = pytest.mark.sky


def raised(name: str, *args: Any, **more: Any) -> BaseException:
    from sky import exceptions

    return getattr(exceptions, name)(*args, **more)


def test_every_row_names_an_exception_that_skypilot_has() -> None:
    from sky import exceptions

    ours_too = {"ConnectionError", "Timeout"}  # of requests, and Python's own
    missing = [name for name in TABLE if name not in ours_too and not hasattr(exceptions, name)]
    assert not missing


@pytest.mark.parametrize(
    ("name", "args", "kind"),
    [
        ("ResourcesMismatchError", ("no",), Refused),
        ("NotSupportedError", ("no",), Refused),
        ("InvalidClusterNameError", ("no",), Refused),
        ("ClusterOwnerIdentityMismatchError", ("no",), Unauthorized),
        ("NoCloudAccessError", ("no",), Unauthorized),
        ("ApiServerConnectionError", ("http://x",), Unreachable),
        ("ApiServerAuthenticationError", ("http://x",), Unauthorized),
        ("ClusterDoesNotExist", ("no",), NotFound),
        ("NoWorkspaceAccessError", ("no",), Unauthorized),  # by its base
        ("RequestAlreadyExistsError", ("no",), AlreadyExists),
    ],
)
def test_by_class(name: str, args: tuple[Any, ...], kind: type[ArealSkyError]) -> None:
    assert type(translate(raised(name, *args))) is kind


@pytest.mark.parametrize(
    ("history", "kind"),
    [
        ([Exception("InsufficientInstanceCapacity: no p4d in us-east-1a")], NoCapacity),
        ([Exception("An error occurred (VcpuLimitExceeded): you have requested more")], QuotaExceeded),
        ([Exception("Quota 'NVIDIA_H100_GPUS' exceeded. Limit: 0.0 in region us-central1")], QuotaExceeded),
        ([Exception("sbatch: error: AssocGrpGRES")], QuotaExceeded),
        ([Exception("(AuthFailure): AWS was not able to validate the provided access credentials")], Unauthorized),
    ],
)
def test_a_failed_provision_is_judged_by_its_history(history: list[Exception], kind: type[ArealSkyError]) -> None:
    error = translate(raised("ResourcesUnavailableError", "Failed to provision", failover_history=history))
    assert type(error) is kind and str(history[0]) in str(error)
    assert isinstance(error, NoCapacity) == (kind is not Unauthorized)


def test_what_the_optimizer_cannot_place_at_all_is_refused() -> None:
    words = "Catalog does not contain any instances satisfying the request: 1x(gpus=V9000:8)"
    assert type(translate(raised("ResourcesUnavailableError", words))) is Refused


def test_words_are_one_short_line_without_colours() -> None:
    words = "\x1b[31mCluster 'a'\x1b[0m is gone.\n  Hint: try again\n" + "x" * 900
    error = translate(raised("ClusterNotUpError", words))
    assert str(error).startswith("Cluster 'a' is gone.; xxx") and "\n" not in str(error) and len(str(error)) < 410


def test_ours_stay_and_the_unknown_is_plain() -> None:
    mine = NoCapacity("mine")
    assert translate(mine) is mine
    assert type(translate(RuntimeError("odd"), "ending a")) is ArealSkyError
    assert str(translate(RuntimeError("odd"), "ending a")) == "ending a: odd"


def test_a_dropped_connection_is_unreachable() -> None:
    import requests

    assert type(translate(requests.exceptions.ConnectionError("refused"))) is Unreachable
    assert type(translate(requests.exceptions.ReadTimeout("slow"))) is Unreachable
    assert type(translate(ConnectionResetError("reset"))) is Unreachable
