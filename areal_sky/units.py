"""Durations, sizes and money: read what people write, print what they can read back.

Durations are seconds, sizes are GiB (2**30 bytes), money is US dollars. All parsers raise InvalidInput with one
message that says what was expected; they never guess a unit.
"""

from __future__ import annotations

import itertools
import math
import re

from areal_sky.errors import InvalidInput

DURATION_GRAMMAR = "a duration such as 100ms, 30s, 2m, 1h30m or 2d"
SIZE_GRAMMAR = "a size such as 32, 32GB, 512MB or 1.5TB"
USD_GRAMMAR = "an amount in US dollars such as 120 or $1,200.50"

_SECONDS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|[dhms]))+", re.ASCII)
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|[dhms])", re.ASCII)

# What people write instead, and what they mean. "month" and the like are left out: their length is not known.
_UNIT_WORDS = {
    "ms": ("msec", "msecs", "millis", "millisecond", "milliseconds"),
    "s": ("sec", "secs", "second", "seconds"),
    "m": ("min", "mins", "minute", "minutes"),
    "h": ("hr", "hrs", "hour", "hours"),
    "d": ("day", "days"),
}
_UNIT_OF_WORD = {word: unit for unit, words in _UNIT_WORDS.items() for word in (unit, *words)}
_LOOSE_PART = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.ASCII)

# Binary, like SkyPilot's own table (constants.MEMORY_SIZE_UNITS): its 1GB is 2**30 bytes.
_GIB = {"k": 2.0**-20, "m": 2.0**-10, "g": 1.0, "t": 2.0**10, "p": 2.0**20}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s?(?:([kmgtp])i?b?)?", re.IGNORECASE | re.ASCII)
_USD = re.compile(r"\$?(\d{1,3}(?:,\d{3})+|\d+)(\.\d+)?", re.ASCII)


def parse_duration_s(text: str) -> float:
    """Seconds from `100ms`, `30s`, `2m`, `1h30m`, `2d`: numbers with a unit each, the largest unit first.

    A number without a unit is refused (2 could be minutes), except 0. Raises InvalidInput.
    """
    text = text.strip()
    if text == "0":
        return 0.0
    if not _DURATION.fullmatch(text):
        hint = suggest_duration(text)
        meant = f", did you mean `{hint}`?" if hint else ""
        raise InvalidInput(f"`{text[:40]}` is not a duration, expected {DURATION_GRAMMAR}{meant}")
    parts = [(float(number), unit) for number, unit in _DURATION_PART.findall(text)]
    sizes = [_SECONDS[unit] for _, unit in parts]
    if any(a <= b for a, b in itertools.pairwise(sizes)):
        raise InvalidInput(f"`{text[:40]}` has its units out of order, expected the largest first, as in 1h30m")
    return math.fsum(number * _SECONDS[unit] for number, unit in parts)


def suggest_duration(text: str) -> str | None:
    """What a near miss was probably meant to be: `100 m` -> `100m`, `2 minutes ago` -> `2m`, `90` -> `90s`."""
    parts = [(number, _UNIT_OF_WORD.get(word or "s")) for number, word in _LOOSE_PART.findall(text.lower())]
    if not parts or any(unit is None for _, unit in parts):
        return None
    hint = "".join(f"{number}{unit}" for number, unit in parts)
    try:
        parse_duration_s(hint)
    except InvalidInput:
        return None
    return hint


def format_duration(seconds: float, parts: int | None = None) -> str:
    """`1h30m`, `1m1.5s`, `100ms`, `-5m`; reads back with `parse_duration_s` (but for the sign), to the millisecond.

    `parts` keeps only that many of the largest units, rounded down, for a person's eye: 3h12m7s -> 3h12m.
    Raises InvalidInput on NaN and infinity.
    """
    if not math.isfinite(seconds):
        raise InvalidInput(f"{seconds} is not a duration")
    millis = round(abs(seconds) * 1000)
    sign = "-" if seconds < 0 and millis else ""
    if millis < 1000:
        return f"{sign}{millis}ms" if millis else "0s"
    found: list[str] = []
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000)):
        count, millis = divmod(millis, size)
        if count:
            found.append(f"{count}{unit}")
    if millis:
        found.append(f"{millis // 1000 if parts and found else millis / 1000:g}s")
    if parts:
        found = [part for part in found[:parts] if part != "0s"]
    return sign + "".join(found)


def parse_gib(text: str) -> float:
    """GiB from `32` (GiB already), `32GB`, `32Gi`, `512MB`, `1.5TB`; binary, as in SkyPilot. Raises InvalidInput."""
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise InvalidInput(f"`{text[:40]}` is not a size, expected {SIZE_GRAMMAR}")
    return float(match[1]) * _GIB[(match[2] or "g").lower()]


def format_gib(gib: float) -> str:
    """`512 MiB`, `80 GiB`, `1.5 TiB`: at most three significant decimals."""
    if abs(gib) >= 1024:
        return f"{gib / 1024:.4g} TiB"
    if abs(gib) >= 1 or gib == 0:
        return f"{gib:.4g} GiB"
    return f"{gib * 1024:.4g} MiB"


def parse_usd(text: str) -> float:
    """Dollars from `120`, `$120`, `1,200.50`. Raises InvalidInput."""
    match = _USD.fullmatch(text.strip())
    if not match:
        raise InvalidInput(f"`{text[:40]}` is not an amount of money, expected {USD_GRAMMAR}")
    return float(match[1].replace(",", "") + (match[2] or ""))


def format_usd(usd: float) -> str:
    """`$1,234.50`; below a cent up to four decimals, so that a small price does not read as nothing."""
    sign = "-" if usd < 0 else ""
    usd = abs(usd)
    return f"{sign}${usd:.4f}" if 0 < usd < 0.01 else f"{sign}${usd:,.2f}"
