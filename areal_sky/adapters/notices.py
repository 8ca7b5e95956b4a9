"""Tells of alerts outside: a webhook (HTTP POST of JSON), a command (JSON on its stdin). Never in the caller's way."""

from __future__ import annotations

import json
import logging
import queue
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

log = logging.getLogger(__name__)
WAITING = 200  # notices; more are dropped, and said so
ANSWER_S = 5.0
COMMAND_S = 30.0
TRIES_AFTER_S = (0.0, 2.0, 10.0)

Told = Callable[[int, str], None]


class Notices:
    """`webhook` may be `$NAME`, read from `environ`, so that an address that is a secret stands in no file."""

    def __init__(self, webhook: str | None, command: str | None, environ: Mapping[str, str], told: Told | None = None):
        """`told` is called in this object's own thread with an alert's number and what was done, in words."""
        self._webhook, self._trouble = webhook, ""
        if webhook and webhook.startswith("$"):
            self._webhook = environ.get(webhook[1:])
            if not self._webhook:
                self._trouble = f"the webhook is not told: {webhook} is not set on the head"
        self._command = command
        self.told = told
        self._queue: queue.Queue[tuple[int, dict[str, Any]]] = queue.Queue(WAITING)
        self._stop = threading.Event()
        if webhook or command:
            threading.Thread(target=self._run, name="notices", daemon=True).start()

    def send(self, number: int, text: str, body: Mapping[str, Any]) -> None:
        """Queues a notice. Chat services show its `text`, programs read the rest."""
        if not (self._webhook or self._command or self._trouble):
            return
        try:
            self._queue.put_nowait((number, {"text": text, "alert": dict(body)}))
        except queue.Full:
            log.error("too many notices wait: %s is not told", text)

    def stop(self) -> None:
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                number, notice = self._queue.get(timeout=1.0)
            except queue.Empty:
                continue
            done = [self._trouble] if self._trouble else []
            if self._webhook:
                done.append(self._post(self._webhook, notice))
            if self._command:
                done.append(self._start(self._command, notice))
            for words in done:
                log.info("alert a%s: %s", number, words)
                if self.told is not None:
                    self.told(number, words)

    def _post(self, url: str, notice: Mapping[str, Any]) -> str:
        host, error = urlsplit(url).hostname or "?", ""  # the rest of a webhook's address may be its secret
        for wait_s in TRIES_AFTER_S:
            if self._stop.wait(wait_s):
                break
            try:
                request = urllib.request.Request(
                    url, json.dumps(notice).encode(), {"Content-Type": "application/json"}, method="POST"
                )
                with urllib.request.urlopen(request, timeout=ANSWER_S):
                    return f"told the webhook at {host}"
            except urllib.error.HTTPError as e:
                error = f"HTTP {e.code}"
                if e.code < 500:
                    break
            except (OSError, ValueError) as e:
                error = str(getattr(e, "reason", "") or type(e).__name__)
        return f"could not tell the webhook at {host}: {error}"

    def _start(self, command: str, notice: Mapping[str, Any]) -> str:
        try:
            done = subprocess.run(
                ["/bin/sh", "-c", command], input=json.dumps(notice).encode() + b"\n", timeout=COMMAND_S, check=False,
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as e:
            return f"the command was not done: {type(e).__name__}"
        if done.returncode == 0:
            return "the command was told"
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        return f"the command failed with exit code {done.returncode}{': ' + last[0][:200] if last else ''}"
