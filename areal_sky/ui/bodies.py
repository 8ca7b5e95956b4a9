"""What requests to the gateway carry, read with care: JSON bodies, fields, numbers. All raise InvalidInput in words."""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any

from fastapi import Depends, Request

from areal_sky.errors import InvalidInput

MAX_BODY_BYTES = 2 * 2**20


class TooLarge(InvalidInput):
    """The body is larger than its route takes."""


def json_body(limit: int) -> Callable[[Request], Awaitable[dict[str, Any]]]:
    """A dependency that gives the body, a JSON object of at most `limit` bytes."""

    # Parsed by hand: FastAPI's own way would refuse lone surrogates, which carry the bytes of logs that are no UTF-8.
    async def parse(request: Request) -> dict[str, Any]:
        data = bytearray()
        async for chunk in request.stream():
            data += chunk
            if len(data) > limit:
                raise TooLarge(f"the body is larger than {limit // 2**20} MiB")
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            raise InvalidInput("the body is not JSON") from None
        if not isinstance(value, dict):
            raise InvalidInput("the body must be a JSON object")
        return value

    return parse


Body = Annotated[dict[str, Any], Depends(json_body(MAX_BODY_BYTES))]


def a_field(raw: Mapping[str, Any], key: str, kind: type) -> Any:
    """A text or a whole number that must be there."""
    value = raw.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise InvalidInput(f"{key}: expected {'a text' if kind is str else 'a whole number'}")
    return value


def whole(values: Mapping[str, str], key: str, default: int | None) -> int | None:
    """A whole number of a query."""
    text = values.get(key)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise InvalidInput(f"{key}: expected a whole number") from None


def a_number(value: Any, key: str) -> float:
    """A finite number, or a text that is one."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise InvalidInput(f"{key}: expected a number")
    return number
