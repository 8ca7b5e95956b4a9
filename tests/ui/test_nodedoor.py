"""The short way for heartbeats: some are taken at a time, bad news at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import MutableMapping
from typing import Any

import pytest

from areal_sky.ui import nodedoor
from areal_sky.ui.nodedoor import HEARTBEAT, NodeDoor


def test_heartbeats_are_taken_together_but_bad_news_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    answers: list[Any] = []

    async def elsewhere(*_: Any) -> None:
        raise AssertionError("not a heartbeat")

    async def send(message: MutableMapping[str, Any]) -> None:
        if "body" in message:
            answers.append(json.loads(message["body"]))

    def take(raw: dict[str, Any]) -> dict[str, Any]:
        taken.append(raw["validity"])
        return {"taken": len(taken)}

    async def post(validity: str) -> None:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": json.dumps({"validity": validity}).encode()}

        headers = [(b"authorization", b"Bearer secret")]
        await door({"type": "http", "path": HEARTBEAT, "method": "POST", "headers": headers}, receive, send)

    async def play() -> None:
        await post("known")  # nobody else is there
        monkeypatch.setattr(nodedoor, "GATHER_S", 3600.0)
        plain = [asyncio.create_task(post("known")) for _ in range(3)]
        await asyncio.gather(post("lost"), post("stale"))
        assert sorted(taken) == ["known", "lost", "stale"]
        door._begin()  # the time is over
        await asyncio.gather(*plain)
        assert taken[3:] == ["known"] * 3
        monkeypatch.setattr(nodedoor, "GATHER_S", 0.01)
        await post("known")

    door = NodeDoor(elsewhere, "secret", take, lambda e: (500, {}), 2**20)
    asyncio.run(play())
    assert [a["taken"] for a in answers] == [1, 2, 3, 4, 5, 6, 7]
