"""Tokens in the environment of our processes. The runner of every rank needs this and little else, so it is alone."""

from __future__ import annotations

import hashlib

SECRET_KEYS = ("AREAL_SKY_TOKENS", "AREAL_SKY_NODE_TOKEN", "AREAL_SKY_RAY_TOKEN")


def task_token(node_token: str) -> str:
    """The token with which tasks on a node may submit and report: derived on both sides, so that it travels nowhere
    and Ray, which keeps what it is given on disk, never has it.
    """
    return hashlib.sha256(f"areal-sky task {node_token}".encode()).hexdigest() if node_token else ""
