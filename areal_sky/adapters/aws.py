"""EC2 as the orphan sweep needs it: machines that SkyPilot tagged, in every region. The only `import boto3`.

Credentials and the endpoint (`AWS_ENDPOINT_URL`) are boto3's own business: nothing of them is read or kept here.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from areal_sky.adapters.catalog import listed_price
from areal_sky.core.orphans import InstanceFound
from areal_sky.errors import ArealSkyError, NotFound, Unauthorized, Unreachable

T = TypeVar("T")
NAME_TAG = "skypilot-cluster-name"
LIVE_STATES = ("pending", "running", "stopping", "stopped")
HOME_REGION = "us-east-1"  # where a list of regions is to be had without any configuration
AT_ONCE = 16
_NO_CREDENTIALS = frozenset({
    "NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "CredentialRetrievalError",
    "TokenRetrievalError", "SSOTokenLoadError", "UnauthorizedSSOTokenError", "NoAuthTokenError",
})  # fmt: skip
_REFUSED = frozenset({
    "AuthFailure", "UnauthorizedOperation", "AccessDenied", "AccessDeniedException", "InvalidClientTokenId",
    "ExpiredToken", "ExpiredTokenException", "RequestExpired", "SignatureDoesNotMatch", "OptInRequired",
})  # fmt: skip


def installed() -> bool:
    return importlib.util.find_spec("boto3") is not None


class Ec2:
    """`run.orphans.Ec2Port` over boto3."""

    def __init__(self, regions: Sequence[str] | None = None):
        """`regions` None: all that the account has enabled. Nothing is asked before the first call."""
        self._regions = regions
        self._session: Any = None

    def instances(self) -> tuple[tuple[InstanceFound, ...], tuple[str, ...]]:
        """Every live instance with SkyPilot's tag, and regions that could not be asked, in words.

        Raises Unauthorized without credentials, Unreachable when no region answers.
        """
        regions = self._regions or _translated_call(self._enabled_regions)
        clients = [(r, _translated_call(lambda r=r: self._client(r))) for r in regions]  # a session is for one thread
        with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
            parts = list(pool.map(lambda c: _region(*c), clients))
        problems = [p for p in parts if isinstance(p, ArealSkyError)]
        if problems and len(problems) == len(parts):
            raise problems[0]
        found = sorted(
            (i for part in parts if isinstance(part, list) for i in part), key=lambda i: (i.region, i.instance_id)
        )
        return tuple(found), tuple(map(str, problems))

    def end(self, instance_id: str, region: str) -> None:
        """Terminates it. Raises NotFound when there is none of that id, Unauthorized, Unreachable."""
        _translated_call(lambda: self._client(region).terminate_instances(InstanceIds=[instance_id]))

    def _enabled_regions(self) -> list[str]:
        reply = self._client(self._home_region()).describe_regions(AllRegions=False)
        return sorted(r["RegionName"] for r in reply["Regions"])

    def _home_region(self) -> str:
        return self._open().region_name or HOME_REGION

    def _client(self, region: str) -> Any:
        from botocore.config import Config

        config = Config(connect_timeout=5, read_timeout=30, retries={"max_attempts": 3, "mode": "standard"})
        return self._open().client("ec2", region_name=region, config=config)

    def _open(self) -> Any:
        if self._session is None:
            import boto3

            self._session = boto3.Session()
        return self._session


def _region(region: str, client: Any) -> list[InstanceFound] | ArealSkyError:
    filters = [
        {"Name": "tag-key", "Values": [NAME_TAG]},
        {"Name": "instance-state-name", "Values": list(LIVE_STATES)},
    ]
    try:
        pages = client.get_paginator("describe_instances").paginate(Filters=filters)
        return [_found(i, region) for page in pages for r in page["Reservations"] for i in r["Instances"]]
    except Exception as e:
        error = _translated(e)
        return type(error)(f"region {region}: {error}")


def _translated_call(call: Callable[[], T]) -> T:
    try:
        return call()
    except Exception as e:
        raise _translated(e) from None


def _found(instance: Any, region: str) -> InstanceFound:
    market = "spot" if instance.get("InstanceLifecycle") == "spot" else "on_demand"
    kind, state = instance["InstanceType"], instance["State"]["Name"]
    # A stopped machine costs its disks alone, which the table does not know.
    price = listed_price("aws", region, kind, market) if state in ("pending", "running") else None
    return InstanceFound(
        instance_id=instance["InstanceId"],
        region=region,
        instance_type=kind,
        state=state,
        market=market,
        launched_s=instance["LaunchTime"].timestamp(),
        tags={t["Key"]: t["Value"] for t in instance.get("Tags", ())},
        usd_per_hour=price,
    )


def _translated(error: Exception) -> ArealSkyError:
    name = type(error).__name__
    code = str(getattr(error, "response", {}).get("Error", {}).get("Code", ""))
    words = " ".join(str(error).split())[:300]
    if name in _NO_CREDENTIALS:
        return Unauthorized(f"no usable AWS credentials here ({words})")
    if code in _REFUSED:
        return Unauthorized(f"AWS refuses these credentials: {words}")
    if code.startswith("InvalidInstanceID"):
        return NotFound(words)
    return Unreachable(f"EC2 cannot be asked: {words}")
