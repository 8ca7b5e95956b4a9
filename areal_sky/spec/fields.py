"""Typed reading of one mapping: each `take` gives a value or notes what is wrong, where, and what was expected.

A mistake never stops the reading: the taker gets the default and goes on, so that every mistake is found at once.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import datetime
from typing import Any, TypeVar

from areal_sky.errors import InvalidInput
from areal_sky.spec.marks import ListNode, MapNode, Node, Notes, ScalarNode, plain
from areal_sky.units import DURATION_GRAMMAR, format_duration, parse_duration_s, parse_usd, suggest_duration

T = TypeVar("T")
MAX_AHEAD_S = 3660 * 86400.0  # ten years


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """`, did you mean ...` with the nearest known word, or nothing when none is near."""
    by_lower = {k.lower(): k for k in known}
    near = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=cutoff)
    return f", did you mean `{by_lower[near[0]]}`?" if near else ""


def show(node: Node) -> str:
    """A value as a mistake names it: short, on one line."""
    if isinstance(node, ListNode):
        return "a list"
    if not isinstance(node, ScalarNode):
        return "a mapping"
    if node.value is None:
        return "nothing"
    text = " ".join(node.text.split())
    text = text if len(text) <= 40 else text[:37] + "..."
    if isinstance(node.value, bool):
        return f"`{text}` (a boolean in YAML)"
    return f'"{text}" (text)' if node.quoted else f"`{text}`"


def is_null(node: Node | None) -> bool:
    """Absent, or written as `key:` with nothing after it, which means the same."""
    return node is None or (isinstance(node, ScalarNode) and node.value is None)


class Fields:
    """The keys of one mapping. `where` names it in messages: `scheduling.pools[0]`, or nothing at the top."""

    def __init__(self, node: Node | None, where: str, notes: Notes, at: Node | None = None) -> None:
        self.where = where
        self.notes = notes
        self.taken: set[str] = set()
        self.hints: dict[str, str] = {}
        self.is_map = isinstance(node, MapNode)
        self.map = node if isinstance(node, MapNode) else MapNode(1, 1)
        self.at: Node = node or at or self.map
        if node is not None and not is_null(node) and not isinstance(node, MapNode):
            notes.add(node, f"{where or 'the spec'} is {show(node)}, expected a mapping of keys to values")

    def path(self, key: str) -> str:
        return f"{self.where}.{key}" if self.where else key

    def wrong(self, at: Node, what: str) -> None:
        self.notes.add(at, what)

    def take(self, key: str) -> Node | None:
        """The value of `key`, None when absent or null. Whatever is never taken is an unknown key in `finish`."""
        self.taken.add(key)
        node = self.map.entries.get(key)
        return None if is_null(node) else node

    def key_at(self, key: str) -> Node:
        """Where `key` stands, or the mapping when it does not."""
        return self.map.keys.get(key, self.at)

    def has(self, key: str) -> bool:
        return not is_null(self.map.entries.get(key))

    def hint(self, meant: Mapping[str, str]) -> None:
        """The known key that people mean by another one: {"count": "replicas"}."""
        self.hints.update(meant)

    def finish(self, also: Collection[str] = ()) -> None:
        """Notes every unknown key, with the nearest known one."""
        known = self.taken | set(also)
        for key, at in self.map.keys.items():
            if key in known:
                continue
            short = key if len(key) <= 60 else key[:57] + "..."
            meant = f", did you mean `{self.hints[key]}`?" if key in self.hints else did_you_mean(key, known)
            place = f"in {self.where}" if self.where else "at the top"
            self.wrong(at, f"unknown key `{short}` {place}{meant or ', expected one of: ' + ', '.join(sorted(known))}")

    # ------------------------------------------------------------ scalars

    def text(self, key: str, expected: str = "text", secret: bool = False) -> str | None:
        """Text. A boolean or number is a mistake that says to quote it (`region: no` is Norway's lament)."""
        node = self.take(key)
        if node is None:
            return None
        if isinstance(node, ScalarNode) and isinstance(node.value, str):
            return node.text
        said = "not text" if secret else show(node)
        plainly = isinstance(node, ScalarNode) and (isinstance(node.value, bool) or expected == "text")
        quote = f': write "{node.text}"' if isinstance(node, ScalarNode) and plainly and not secret else ""
        self.wrong(node, f"{self.path(key)} is {said}, expected {expected}{quote}")
        return None

    def required_text(self, key: str, expected: str = "text") -> str | None:
        """Like `text`, and absent is a mistake."""
        if not self.has(key):
            self.take(key)
            if self.is_map:
                self.wrong(self.key_at(key), f"{self.where} has no `{key}`, expected {expected}")
            return None
        return self.text(key, expected)

    def choice(self, key: str, choices: Collection[str]) -> str | None:
        """One of `choices`, exactly."""
        expected = "one of: " + ", ".join(choices)
        value = self.text(key, expected)
        if value is None or value in choices:
            return value
        node = self.map.entries[key]
        self.wrong(node, f"{self.path(key)} is {show(node)}, expected {expected}{did_you_mean(value, choices)}")
        return None

    def boolean(self, key: str) -> bool | None:
        node = self.take(key)
        if node is None:
            return None
        if isinstance(node, ScalarNode) and isinstance(node.value, bool):
            return node.value
        self.wrong(node, f"{self.path(key)} is {show(node)}, expected true or false")
        return None

    def number(
        self,
        key: str,
        expected: str,
        ok: Callable[[float], bool] = lambda _: True,
        whole: bool = False,
    ) -> float | None:
        """A finite number for which `ok` holds; `expected` says in words which those are."""
        node = self.take(key)
        if node is None:
            return None
        value = number_of(node)
        if value is None:
            unquote = isinstance(node, ScalarNode) and node.quoted and _is_number(node.text)
            meant = f", did you mean `{node.text}` without quotes?" if isinstance(node, ScalarNode) and unquote else ""
            self.wrong(node, f"{self.path(key)} is {show(node)}, expected {expected}{meant}")
            return None
        if not math.isfinite(value) or (whole and value != int(value)) or not ok(value):
            self.wrong(node, f"{self.path(key)} is {show(node)}, expected {expected}")
            return None
        return value

    def whole(self, key: str, low: int, high: int | None = None) -> int | None:
        """A whole number from `low` to `high`."""
        expected = f"a whole number from {low} to {high:,}" if high is not None else f"a whole number, at least {low}"
        value = self.number(key, expected, lambda v: low <= v and (high is None or v <= high), whole=True)
        return None if value is None else int(value)

    def usd(self, key: str) -> float | None:
        """A positive amount: a number, or text such as `$1,200`."""
        node = self.map.entries.get(key)
        if isinstance(node, ScalarNode) and isinstance(node.value, str):
            self.taken.add(key)
            try:
                value = parse_usd(node.text)
            except InvalidInput as e:
                self.wrong(node, f"{self.path(key)}: {e}")
                return None
            if value > 0:
                return value
        return self.number(key, "an amount in US dollars above 0", lambda v: v > 0)

    def duration_s(self, key: str, low_s: float, high_s: float) -> float | None:
        """Seconds from a duration within bounds. A number without a unit is refused: 2 could be minutes."""
        node = self.take(key)
        if node is None:
            return None
        if not isinstance(node, ScalarNode) or isinstance(node.value, bool):
            self.wrong(node, f"{self.path(key)} is {show(node)}, expected {DURATION_GRAMMAR}")
            return None
        try:
            value = parse_duration_s(node.text)
        except InvalidInput:
            unit = " without a unit" if isinstance(node.value, int | float) else ", which is not a duration"
            meant = _meant(suggest_duration(node.text), low_s, high_s)
            self.wrong(node, f"{self.path(key)} is {show(node)}{unit}, expected {DURATION_GRAMMAR}{meant}")
            return None
        if not low_s <= value <= high_s:
            reads = f"{show(node)} ({format_duration(min(value, 1e12), 2)})"
            bounds = f"{format_duration(low_s)} to {format_duration(high_s)}"
            self.wrong(node, f"{self.path(key)} is {reads}, expected {bounds}{_meant(node.text, low_s, high_s)}")
            return None
        return value

    # ------------------------------------------------------------ collections

    def block(self, key: str) -> Fields:
        """The mapping under `key`; empty when absent."""
        return Fields(self.take(key), self.path(key), self.notes, at=self.key_at(key))

    def items(self, key: str, expected: str) -> list[tuple[str, Node]]:
        """The items of the list under `key`, each with its path."""
        node = self.take(key)
        if node is None:
            return []
        if not isinstance(node, ListNode):
            self.wrong(node, f"{self.path(key)} is {show(node)}, expected {expected}")
            return []
        return [(f"{self.path(key)}[{i}]", item) for i, item in enumerate(node.items)]

    def raw(self, key: str) -> Any:
        """The value as plain data, unread."""
        node = self.take(key)
        return None if node is None else plain(node)


def number_of(node: Node) -> float | None:
    """The number that a node is; None for anything else. Booleans and quoted numbers are something else."""
    if isinstance(node, ScalarNode) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        try:
            return float(node.value)
        except OverflowError:
            return math.inf
    return None


def moment_s(f: Fields, key: str, now_s: float | None, past: bool = False) -> float | None:
    """A moment with its time zone, or a duration from now on, in Unix seconds. `past`: it may be over already."""
    node = f.take(key)
    if node is None:
        return None
    expected = "a moment such as 2030-12-24T08:00:00Z, or a duration from now such as 12h"
    wrong = f"{f.path(key)} is {show(node)}"
    if not isinstance(node, ScalarNode) or not isinstance(node.value, str):
        f.wrong(node, f"{wrong}, expected {expected}")
        return None
    text = node.text.strip()
    if re.match(r"\d{4}-", text, re.ASCII):
        try:
            moment = datetime.fromisoformat(text)
            at_s = moment.timestamp() if moment.tzinfo else None
        except (ValueError, OverflowError):
            f.wrong(node, f"{wrong}, which is no date and time, expected {expected}")
            return None
        if at_s is None:
            whole = text if "T" in text or " " in text else f"{text}T00:00:00"
            f.wrong(node, f"{wrong} without a time zone, expected {expected}, did you mean `{whole}Z`?")
            return None
        if now_s is not None and at_s <= now_s and not past:
            ago = format_duration(now_s - at_s, parts=2)
            f.wrong(node, f"{wrong}, which was {ago} ago, expected a moment to come")
            return None
        return at_s
    try:
        after_s = parse_duration_s(text)
    except InvalidInput:
        hint = suggest_duration(text)
        f.wrong(node, f"{wrong}, expected {expected}" + (f", did you mean `{hint}`?" if hint else ""))
        return None
    if after_s <= 0 or after_s > MAX_AHEAD_S:
        f.wrong(node, f"{wrong}, expected {expected}")
        return None
    if now_s is None:
        f.wrong(node, f"{wrong}, which counts from now, expected a moment: this is read without a clock")
        return None
    return now_s + after_s


def unique(fields: Fields, seen: dict[str, Node], value: str | None, key: str, what: str) -> None:
    """Notes a `value` that an earlier item had."""
    if value is None:
        return
    node = fields.map.entries[key]
    if value in seen:
        fields.wrong(node, f"{what} `{value}` twice, expected it once: it stands on line {seen[value].line} already")
    seen.setdefault(value, node)


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _meant(duration: str | None, low_s: float, high_s: float) -> str:
    """The duration as a suggestion if within bounds, else its number with the first unit that is: 100m -> 100ms."""
    if duration is None:
        return ""
    digits = duration.rstrip("dhms")
    same_number = [f"{digits}{unit}" for unit in ("ms", "s", "m", "h", "d")] if _is_number(digits) else []
    for hint in (duration, *same_number):
        if low_s <= parse_duration_s(hint) <= high_s:
            return f", did you mean `{hint}`?"
    return ""
