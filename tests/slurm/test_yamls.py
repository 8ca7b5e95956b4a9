"""The generated YAMLs alone are enough: `areal-sky render`, then plain `sky launch` by hand, make one cluster."""

from __future__ import annotations

import functools
import json
import re
import secrets
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from tests.testbed.testbed import Testbed, free_port, until

SPEC = """
name: hand
infra: {infra}
resources: {{accelerators: "{accelerators}", cpus: 8}}
envs: {{HF_TOKEN: planted-in-envs}}
secrets: {{WANDB_API_KEY: planted-in-secrets}}
run: |
  python -c 'import os, ray; ray.init(); print("RAY NODES", len(ray.nodes()), len(os.environ["HF_TOKEN"]))'
"""
LEASE = '"lease_s": 600.0'
NAMES = ("hand-head-0", "hand-main-0")


def rendered(bed: Testbed, out: Path) -> Path:
    """The folder with the YAMLs and the wheel, as `areal-sky render` writes them."""
    spec = out.parent / "hand.yaml"
    spec.write_text(SPEC.format(infra=bed.infra, accelerators=bed.accelerators))
    bed.areal_sky(out.parent / "areal_sky_home", "render", str(spec), "--out", str(out))
    for file in out.glob("*.yaml"):
        text = file.read_text()
        assert LEASE in text
        file.write_text(text.replace(LEASE, LEASE.replace("600.0", "45.0")))
    return out


def tokens() -> dict[str, str]:
    """What the head of head.yaml says to export."""
    new = {right: secrets.token_hex(32) for right in ("read", "submit", "operate", "node", "ray")}
    return {
        "AREAL_SKY_TOKENS": json.dumps(new),
        "AREAL_SKY_NODE_TOKEN": new["node"],
        "AREAL_SKY_RAY_TOKEN": new["ray"],
    }


@contextmanager
def tunnel(bed: Testbed, head: str, folder: Path) -> Iterator[Callable[[str], list[dict[str, str]]]]:
    """The nodes that the gateway sees, asked through `ssh -L` over SkyPilot's own ssh settings."""
    config, port = folder / "ssh-config", free_port()
    text = (bed.home / ".sky" / "generated" / "ssh" / head).read_text()
    config.write_text(text.replace("~/", f"{bed.home}/"))
    argv = ["ssh", "-F", str(config), "-o", "BatchMode=yes", "-o", "ExitOnForwardFailure=yes",
            "-N", "-L", f"{port}:127.0.0.1:8790", head]  # fmt: skip
    running: list[subprocess.Popen[bytes]] = []

    def nodes(token: str) -> list[dict[str, str]]:
        if not running or running[-1].poll() is not None:
            running.append(subprocess.Popen(argv, env=bed.env(), stdin=subprocess.DEVNULL))
        headers = {"Authorization": f"Bearer {token}"}
        with suppress(httpx.HTTPError):
            return httpx.get(f"http://127.0.0.1:{port}/v1/view", headers=headers, timeout=10).json()["nodes"]
        return []

    try:
        yield nodes
    finally:
        for process in running:
            process.kill()
            process.wait()


@pytest.mark.timeout(900)
def test_head_and_worker_launched_by_hand_are_one_cluster(clean_testbed: Testbed, tmp_path: Path) -> None:
    bed, out, given = clean_testbed, rendered(clean_testbed, tmp_path / "out"), tokens()
    launch = functools.partial(bed.launch, timeout_s=300, folder=out)  # as a person types it in that folder
    text = "".join(p.read_text() for p in out.glob("*.yaml"))
    assert "planted" not in text and (out / "main.yaml").exists()
    try:
        launch(NAMES[0], "head.yaml", "--secret", "AREAL_SKY_TOKENS", env=bed.env(**given))

        def address() -> str | None:
            log = bed.sky("logs", NAMES[0], "1", "--no-follow")
            said = re.search(r"nodes join with --env AREAL_SKY_HEAD_IP=([0-9.]+)", log)
            return said and said[1]

        head_ip = until(address, 120, every_s=2)
        names = ("AREAL_SKY_NODE_TOKEN", "AREAL_SKY_RAY_TOKEN", "HF_TOKEN", "WANDB_API_KEY")
        launch(
            NAMES[1], "main.yaml", "--env", f"AREAL_SKY_HEAD_IP={head_ip}",
            *(word for name in names for word in ("--secret", name)),
            env=bed.env(**given, HF_TOKEN="t" * 37, WANDB_API_KEY="w" * 20),
        )  # fmt: skip
        read = json.loads(given["AREAL_SKY_TOKENS"])["read"]

        with tunnel(bed, NAMES[0], tmp_path) as nodes:
            seen = until(lambda: len(found := nodes(read)) == 2 and found, 240, every_s=1)
        assert {(n["group"], n["replica"]) for n in seen} == {("head", NAMES[0]), ("main", NAMES[1])}
        log = until(lambda: "RAY NODES" in (t := bed.sky("logs", NAMES[1], "1", "--no-follow")) and t, 120, every_s=2)
        assert "RAY NODES 2 37" in log  # the user's run, in the cluster's Ray, with the secret that was given
        # The machine's own Ray was found, and the wheel has a venv of its own: SkyPilot's runtime is not touched.
        assert re.search(r"areal_sky: Python 3\S+ of /\S+, in /\S+/\.areal_sky/venv-", log), log
        for name in NAMES:
            told = bed.sky("logs", name, "1", "--no-follow")
            assert not [k for k, v in given.items() if v in told], "a token in the log"

        # Nobody renews the worker's lease any more: it gives its machine back, unasked.
        bed.down(NAMES[0])
        until(lambda: not [job for job in bed.jobs() if job["name"].startswith(NAMES[1])], 180, every_s=1)
    finally:
        bed.down(*NAMES)
