"""YAML text -> a tree in which every key and value knows its line and column.

Built from libyaml's event stream with a stack of our own, because its composer recurses in C and would overflow on
hostile nesting. Values are resolved as `yaml.safe_load` would (YAML 1.1: `no` is false), so that SkyPilot reads the
same; timestamps stay text, because JSON has none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import yaml

from areal_sky.errors import Mistake, SpecError

MAX_TEXT_BYTES = 1 << 20  # a spec of a thousand groups is under 200 kB
MAX_DEPTH = 50  # the deepest thing in real life is a Kubernetes pod_config, about 15
MAX_VALUES = 100_000  # with aliases expanded: what everything after this module may have to walk

Scalar = str | int | float | bool | None
_FORBIDDEN = yaml.reader.Reader.NON_PRINTABLE  # control characters and lone surrogates
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(slots=True)
class Node:
    """A value at `line`:`column`, both from 1. `size` counts it and everything inside, aliases expanded."""

    line: int
    column: int
    size: int = field(default=1, init=False)


@dataclass(slots=True)
class ScalarNode(Node):
    """`text` is what stands in the file (quotes removed), `value` what YAML makes of it."""

    value: Scalar
    text: str
    quoted: bool


@dataclass(slots=True)
class ListNode(Node):
    items: list[Node]


@dataclass(slots=True)
class MapNode(Node):
    """`keys` holds where each key stands, `entries` its value, both in file order."""

    entries: dict[str, Node] = field(default_factory=dict[str, Node])
    keys: dict[str, Node] = field(default_factory=dict[str, Node])


class Notes:
    """Collects the mistakes of one file."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.mistakes: list[Mistake] = []
        self.told: frozenset[tuple[int, int]] = frozenset()

    def add(self, at: Node, what: str) -> None:
        if (at.line, at.column) not in self.told:
            self.mistakes.append(Mistake(self.file, at.line, at.column, what))

    def inherit(self) -> None:
        """From here on, what was noted is read again through every group that inherits it: it is wrong once."""
        self.told = frozenset((m.line, m.column) for m in self.mistakes)

    def raise_if_any(self) -> None:
        """Raises SpecError with every mistake, if there is one."""
        if self.mistakes:
            raise SpecError(self.mistakes)


def parse(text: str, notes: Notes) -> Node | None:
    """The tree of the one document in `text`; None when it is empty. Duplicate and non-text keys are noted.

    Raises SpecError at once when `text` is not YAML at all, or is too big, too deep or expands without end.
    """
    start = Node(1, 1)
    forbidden = _FORBIDDEN.search(text)
    if forbidden:
        code = f"a character (U+{ord(forbidden[0]):04X}) that YAML does not allow, expected text"
        raise _refused(notes, _at(text, forbidden.start()), code)
    size = len(text.encode())
    if size > MAX_TEXT_BYTES:
        raise _refused(notes, start, f"the file has {size:,} bytes, expected at most {MAX_TEXT_BYTES:,}")
    try:
        return _Builder(notes).build(cast(Any, yaml).parse(text, Loader=_LOADER))
    except yaml.MarkedYAMLError as e:
        raise _refused(notes, *_syntax_error(text, e)) from None
    except yaml.YAMLError:
        raise _refused(notes, start, "not valid YAML") from None


def plain(node: Node) -> Any:
    """The node as JSON-like Python values. NaN and infinity become their text: JSON has neither."""
    if isinstance(node, MapNode):
        return {key: plain(value) for key, value in node.entries.items()}
    if isinstance(node, ListNode):
        return [plain(item) for item in node.items]
    scalar = cast(ScalarNode, node)
    if isinstance(scalar.value, float) and not math.isfinite(scalar.value):
        return scalar.text
    return scalar.value


class _Builder:
    """Turns events into nodes. Open collections are a stack; a mapping holds its pending key until its value comes."""

    def __init__(self, notes: Notes) -> None:
        self.notes = notes
        self.anchors: dict[str, Node | None] = {}  # None: not complete yet
        self.stack: list[tuple[ListNode | MapNode, str | None, list[Node]]] = []
        self.root: Node | None = None
        self.resolve = _resolver()

    def build(self, events: Iterator[Any]) -> Node | None:
        documents = 0
        for event in events:
            at = Node(event.start_mark.line + 1, event.start_mark.column + 1)
            match event:
                case yaml.DocumentStartEvent():
                    documents += 1
                    if documents > 1:
                        raise _refused(
                            self.notes,
                            at,
                            "a second YAML document (a pipeline of tasks), expected one document: "
                            "a cluster is one spec, so keep one file for each",
                        )
                case yaml.AliasEvent():
                    self.place(self.alias(at, event.anchor))
                case yaml.ScalarEvent():
                    value = self.resolve(event.tag, event.value, event.implicit)
                    if value is _UNREADABLE:
                        self.notes.add(
                            at,
                            "a value that YAML cannot read as what it looks like, expected plain text "
                            "or a number: put it in quotes",
                        )
                        value = event.value
                    self.complete(ScalarNode(at.line, at.column, value, event.value, bool(event.style)), event.anchor)
                case yaml.SequenceStartEvent():
                    self.open(ListNode(at.line, at.column, []), event.anchor)
                case yaml.MappingStartEvent():
                    self.open(MapNode(at.line, at.column), event.anchor)
                case yaml.SequenceEndEvent() | yaml.MappingEndEvent():
                    node, anchor, parts = self.stack.pop()
                    self.close(node, parts)
                    self.complete(node, anchor)
                case _:
                    pass
        return self.root

    def open(self, node: ListNode | MapNode, anchor: str | None) -> None:
        if len(self.stack) >= MAX_DEPTH:
            raise _refused(self.notes, node, f"nested more than {MAX_DEPTH} deep, expected a spec")
        if anchor:
            self.anchors[anchor] = None
        self.stack.append((node, anchor, []))

    def complete(self, node: Node, anchor: str | None) -> None:
        if anchor:
            self.anchors[anchor] = node
        self.place(node)

    def place(self, node: Node) -> None:
        if not self.stack:
            self.root = node
            return
        parent, _, parts = self.stack[-1]
        parts.append(node)
        parent.size += node.size
        if parent.size > MAX_VALUES:
            raise _refused(self.notes, node, f"aliases expand to more than {MAX_VALUES:,} values, expected a spec")

    def alias(self, at: Node, anchor: str) -> Node:
        # The name is not repeated: an unquoted secret may begin with `*`.
        if anchor not in self.anchors:
            raise _refused(
                self.notes,
                at,
                "a value that begins with `*` is a YAML alias and no anchor has this name, "
                "expected text: put it in quotes",
            )
        node = self.anchors[anchor]
        if node is None:
            raise _refused(self.notes, at, "an alias to the very value that it stands in, expected an end to it")
        return node

    def close(self, node: ListNode | MapNode, parts: list[Node]) -> None:
        if isinstance(node, ListNode):
            node.items = parts
            return
        merged: list[Node] = []
        for key, value in zip(parts[::2], parts[1::2], strict=True):
            if isinstance(key, ScalarNode) and key.text == "<<" and not key.quoted:
                merged.append(value)
            elif not isinstance(key, ScalarNode):
                self.notes.add(key, f"a {'list' if isinstance(key, ListNode) else 'mapping'} as a key, expected text")
            elif not isinstance(key.value, str):
                self.notes.add(
                    key, f'the key `{key.text}` reads as {_kind(key.value)} in YAML, expected text: write "{key.text}"'
                )
            elif key.text in node.entries:
                first = node.keys[key.text]
                self.notes.add(
                    key, f"duplicate key `{key.text}`, expected it once: it stands on line {first.line} already"
                )
            else:
                node.entries[key.text], node.keys[key.text] = value, key
        for source in merged:
            self.merge(node, source)

    def merge(self, node: MapNode, source: Node) -> None:
        """YAML's `<<`: keys of `source` (or of each in a list, the first winning) that `node` does not have."""
        if isinstance(source, ListNode):
            for item in source.items:
                self.merge(node, item)
        elif isinstance(source, MapNode):
            for key, value in source.entries.items():
                if key not in node.entries:
                    node.entries[key], node.keys[key] = value, source.keys[key]
                    node.size += value.size
        else:
            self.notes.add(source, "`<<` merges mappings, expected a mapping or an alias of one")


_UNREADABLE: Any = object()


def _resolver() -> Callable[[str | None, str, tuple[bool, bool]], Any]:
    """tag, text, implicit -> the value that `yaml.safe_load` gives."""
    loader: Any = yaml.SafeLoader("")

    def resolve(tag: str | None, text: str, implicit: tuple[bool, bool]) -> Any:
        if tag is None or tag == "!":
            tag = str(loader.resolve(yaml.ScalarNode, text, implicit))
        if tag in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:merge"):
            return text
        if tag == "tag:yaml.org,2002:value":  # a lone `=`
            return text
        try:
            value = loader.construct_object(yaml.ScalarNode(tag, text))
        except (yaml.YAMLError, ValueError, ArithmeticError, LookupError):
            return _UNREADABLE
        return value if value is None or isinstance(value, str | int | float) else _UNREADABLE

    return resolve


def _kind(value: Scalar) -> str:
    if value is None:
        return "nothing"
    return "a boolean" if isinstance(value, bool) else "a number"


def _refused(notes: Notes, at: Node, what: str) -> SpecError:
    notes.add(at, what)
    return SpecError(notes.mistakes)


def _at(text: str, index: int) -> Node:
    before = text[:index]
    return Node(before.count("\n") + 1, index - (before.rfind("\n") + 1) + 1)


def _syntax_error(text: str, error: Any) -> tuple[Node, str]:
    """Where, and one line that says what; never the text of a value, which may be a secret."""
    mark = error.problem_mark or error.context_mark
    at = Node(mark.line + 1, mark.column + 1) if mark else Node(1, 1)
    lines: Sequence[str] = text.split("\n")
    line = lines[at.line - 1] if at.line <= len(lines) else ""
    indent = line[: len(line) - len(line.lstrip())]
    if "\t" in indent:
        return Node(at.line, indent.index("\t") + 1), "a tab in the indentation, expected spaces: YAML takes no tabs"
    problem = str(error.problem or "cannot be read")
    if problem.startswith("mapping values are not allowed"):
        problem = "a `:` where no key can be (wrong indentation, or text with a colon that needs quotes)"
    elif problem.startswith("did not find expected key"):
        problem = "did not find expected key (wrong indentation, or a missing `-` or `:`)"
    during = f", {error.context}" if error.context else ""
    if error.context_mark and error.context_mark.line != mark.line:
        during += f" that began on line {error.context_mark.line + 1}"
    return at, f"not valid YAML: {problem}{during}"
