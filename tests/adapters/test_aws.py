"""Real boto3 against moto's server: what is found, what is ended, and what is said when AWS will not talk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError, EndpointConnectionError
from click.testing import CliRunner
from moto import settings
from moto.server import ThreadedMotoServer

from areal_sky.adapters import aws
from areal_sky.adapters.aws import Ec2
from areal_sky.adapters.catalog import listed_price
from areal_sky.errors import NotFound, Unauthorized, Unreachable
from areal_sky.run import orphans
from areal_sky.run.orphans import Places

# As SkyPilot makes them: its own tags and, from the task's labels, ours.
OURS = {"skypilot-cluster-name": "lost-rollout-0-ab12", "areal-sky-cluster": "lost", "areal-sky-group": "rollout"}


@pytest.fixture(scope="module")
def endpoint(free_port: Any) -> Iterator[str]:
    port = free_port()
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "ec2_load_default_amis", lambda: False)  # seconds for each region
        server.start()
        yield f"http://127.0.0.1:{port}"
        server.stop()


@pytest.fixture
def ec2(endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Ec2:
    """An account with nothing in it."""
    no_credentials(monkeypatch, tmp_path)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAFAKE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "fake")
    import urllib.request

    urllib.request.urlopen(urllib.request.Request(f"{endpoint}/moto-api/reset", method="POST")).read()
    return Ec2(["us-east-1", "eu-west-1"])


def no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION",
                 "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL"):  # fmt: skip
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def make(region: str, kind: str, tags: dict[str, str], *, spot: bool = False) -> str:
    client = boto3.client("ec2", region_name=region)
    market: dict[str, Any] = {"InstanceMarketOptions": {"MarketType": "spot"}} if spot else {}
    specs = [{"ResourceType": "instance", "Tags": [{"Key": k, "Value": v} for k, v in tags.items()]}]
    made = client.run_instances(
        ImageId="ami-12c6146b", InstanceType=kind, MinCount=1, MaxCount=1, TagSpecifications=specs, **market
    )
    return made["Instances"][0]["InstanceId"]


def state(region: str, instance_id: str) -> str:
    reply = boto3.client("ec2", region_name=region).describe_instances(InstanceIds=[instance_id])
    return reply["Reservations"][0]["Instances"][0]["State"]["Name"]


def test_tagged_instances_of_every_region_with_type_time_and_price(ec2: Ec2) -> None:
    east = make("us-east-1", "p3.16xlarge", OURS)
    west = make("eu-west-1", "p3.2xlarge", OURS)
    make("us-east-1", "p3.2xlarge", {"Name": "somebody's web server"})
    over = make("us-east-1", "p3.2xlarge", OURS)
    boto3.client("ec2", region_name="us-east-1").terminate_instances(InstanceIds=[over])
    found, problems = Ec2().instances()
    assert problems == ()
    assert [(i.instance_id, i.region, i.instance_type, i.state) for i in found] == [
        (west, "eu-west-1", "p3.2xlarge", "running"), (east, "us-east-1", "p3.16xlarge", "running")
    ]  # fmt: skip
    assert found[1].tags == OURS
    assert found[1].launched_s > 1.7e9
    price = listed_price("aws", "us-east-1", "p3.16xlarge", "on_demand")
    assert price is not None and found[1].usd_per_hour == price


def test_a_stopped_machine_is_found_and_has_no_price_per_hour(ec2: Ec2) -> None:
    stopped = make("us-east-1", "p3.16xlarge", OURS)
    boto3.client("ec2", region_name="us-east-1").stop_instances(InstanceIds=[stopped])
    (found,) = ec2.instances()[0]
    assert (found.state, found.usd_per_hour) == ("stopped", None)


def test_ending_one_leaves_the_others(ec2: Ec2) -> None:
    goes, stays = make("us-east-1", "p3.2xlarge", OURS), make("us-east-1", "p3.2xlarge", OURS)
    ec2.end(goes, "us-east-1")
    assert state("us-east-1", goes) in ("shutting-down", "terminated")
    assert [i.instance_id for i in ec2.instances()[0]] == [stays]
    with pytest.raises(NotFound):
        ec2.end("i-0123456789abcdef0", "us-east-1")


def test_the_command_lists_read_only_and_ends_on_yes(
    ec2: Ec2, private_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from areal_sky.ui.cli.main import cli

    monkeypatch.setattr("areal_sky.core.orphans.GRACE_S", 0.0)
    monkeypatch.setattr(orphans, "usual_places", lambda: Places(None, Ec2(["us-east-1", "us-west-2"]), lambda: ()))
    ours = make("us-west-2", "p3.2xlarge", OURS)
    skypilots = make("us-west-2", "p3.2xlarge", {"skypilot-cluster-name": "mnist-ab12"})
    shown = CliRunner().invoke(cli, ["status", "--orphans"]).output
    assert f"EC2 instance {ours}  us-west-2, p3.2xlarge, on-demand, running" in shown and skypilots not in shown
    assert "$3.06/h" in shown and "it was launched by hand" in shown
    assert state("us-west-2", ours) == "running"
    done = CliRunner().invoke(cli, ["down", "--orphans", "--yes"])
    assert done.exit_code == 0 and "termination accepted by EC2" in done.output
    assert state("us-west-2", ours) in ("shutting-down", "terminated")
    assert state("us-west-2", skypilots) == "running"


def test_without_credentials_there_is_one_message_and_no_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, private_home: Path
) -> None:
    from areal_sky.ui.cli.main import cli

    no_credentials(monkeypatch, tmp_path)
    with pytest.raises(Unauthorized, match="no usable AWS credentials"):
        Ec2().instances()
    monkeypatch.setattr(orphans, "usual_places", lambda: Places(None, Ec2(), lambda: ()))
    done = CliRunner().invoke(cli, ["status", "--orphans"])
    assert done.exit_code == 0
    assert done.output.count("no usable AWS credentials") == 1


def test_nothing_listens_there(ec2: Ec2, monkeypatch: pytest.MonkeyPatch, free_port: Any) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(Unreachable):
        Ec2(["us-east-1"]).instances()


def test_one_region_that_refuses_does_not_hide_the_others(ec2: Ec2, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = make("us-east-1", "p3.2xlarge", OURS)
    plain = aws.Ec2._client

    def client(self: Ec2, region: str) -> Any:
        made = plain(self, region)
        if region == "eu-west-1":
            made.meta.events.register("before-call.ec2", lambda **_: refuse())
        return made

    def refuse() -> None:
        raise ClientError({"Error": {"Code": "UnauthorizedOperation", "Message": "by policy"}}, "DescribeInstances")

    monkeypatch.setattr(aws.Ec2, "_client", client)
    found, problems = Ec2(["eu-west-1", "us-east-1"]).instances()
    assert [i.instance_id for i in found] == [ours]
    assert len(problems) == 1 and problems[0].startswith("region eu-west-1: AWS refuses")
    with pytest.raises(Unauthorized):
        Ec2(["eu-west-1"]).instances()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ClientError({"Error": {"Code": "AuthFailure", "Message": "m"}}, "X"), Unauthorized),
        (ClientError({"Error": {"Code": "ExpiredToken", "Message": "m"}}, "X"), Unauthorized),
        (ClientError({"Error": {"Code": "InvalidInstanceID.NotFound", "Message": "m"}}, "X"), NotFound),
        (ClientError({"Error": {"Code": "RequestLimitExceeded", "Message": "m"}}, "X"), Unreachable),
        (EndpointConnectionError(endpoint_url="http://x"), Unreachable),
    ],
)
def test_errors_are_ours(error: Exception, kind: type[Exception]) -> None:
    assert type(aws._translated(error)) is kind
