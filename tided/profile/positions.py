"""Where each key of a TOML text stands, for messages that name a line and a column.

`tomli` says what a document means, not where. This scanner says where, and only of a text that a TOML parser has
already accepted: it follows the grammar's outline (headers, keys, the extent of values) and judges nothing.

A location is the path of keys, with an int for an element of an array: `("parallel", "hosts", 1)`.
"""

import re
from typing import NamedTuple

import tomli

Location = tuple[str | int, ...]

_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_SPACE = re.compile(r"[ \t]*")
_BARE_KEY = re.compile(r"[^\s.=\]\"',{}\[#]+")
_STRING = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}|'
    r"'''.*?'{3,5}|"
    r'"(?:\\.|[^"\\\n])*"|'
    r"'[^'\n]*'",
    re.DOTALL,
)
_SCALAR = re.compile(r"[^,\]}#\r\n]*[^,\]}#\s]")


class Span(NamedTuple):
    """Offsets into the text, `end` exclusive."""

    start: int
    end: int


class Positions(NamedTuple):
    """`keys` is where a key or header is written, `values` where its value is; a header has no value of its own."""

    keys: dict[Location, Span]
    values: dict[Location, Span]


def locate(text: str) -> Positions:
    """Locations of all keys of `text`, which is valid TOML with line ends of any kind."""
    return _Scanner(text).document()


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0
        self.found = Positions({}, {})

    def document(self) -> Positions:
        table: Location = ()
        tables_seen: dict[Location, int] = {}
        while self._skip(_BLANK) < len(self.text):
            if self._peek("["):
                table = self._header(tables_seen)
            else:
                self._pair(table)
        return self.found

    def _header(self, tables_seen: dict[Location, int]) -> Location:
        """`[a.b]` or `[[a.b]]`; each further `[[a.b]]` is the next element of that array."""
        array = self._peek("[[")
        self.at += 2 if array else 1
        start = self._skip(_SPACE)
        names = [name for name, _ in self._dotted()]
        end = self.at
        self._skip(_SPACE)
        self.at += 2 if array else 1
        location = _through_arrays(names, tables_seen)
        if array:
            tables_seen[location] = tables_seen.get(location, -1) + 1
            self.found.keys.setdefault(location, Span(start, end))
            location = (*location, tables_seen[location])
        # A header after `[a.b]` may name `a` itself: the explicit one is the better place to point at.
        self.found.keys[location] = Span(start, end)
        self._note_parents(location, Span(start, end))
        return location

    def _pair(self, table: Location) -> None:
        """`a.b = value`, in the document or in an inline table."""
        names = self._dotted()
        location = (*table, *(name for name, _ in names))
        self._note_parents(location, names[0][1])
        self.found.keys[location] = Span(names[0][1].start, names[-1][1].end)
        self._skip(_SPACE)
        self.at += 1  # "="
        self._skip(_SPACE)
        self._value(location)

    def _note_parents(self, location: Location, span: Span) -> None:
        for depth in range(1, len(location)):
            self.found.keys.setdefault(location[:depth], span)

    def _dotted(self) -> list[tuple[str, Span]]:
        names = [self._key()]
        while self._skip(_SPACE) < len(self.text) and self._peek("."):
            self.at += 1
            self._skip(_SPACE)
            names.append(self._key())
        return names

    def _key(self) -> tuple[str, Span]:
        start = self.at
        quoted = self._peek('"') or self._peek("'")
        raw = self._take(_STRING if quoted else _BARE_KEY)
        name = str(tomli.loads(f"k = {raw}")["k"]) if quoted else raw
        return name, Span(start, self.at)

    def _value(self, location: Location) -> None:
        start = self.at
        if self._peek("["):
            self._array(location)
        elif self._peek("{"):
            self._inline_table(location)
        elif self._peek('"') or self._peek("'"):
            self._take(_STRING)
        else:
            self._take(_SCALAR)
        self.found.values[location] = Span(start, self.at)

    def _array(self, location: Location) -> None:
        self.at += 1
        index = 0
        while self._skip(_BLANK) < len(self.text) and not self._peek("]"):
            if self._peek(","):
                self.at += 1
                continue
            start = self.at
            self._value((*location, index))
            self.found.keys[(*location, index)] = Span(start, self.at)
            index += 1
        self.at += 1

    def _inline_table(self, location: Location) -> None:
        self.at += 1
        while self._skip(_BLANK) < len(self.text) and not self._peek("}"):
            if self._peek(","):
                self.at += 1
                continue
            self._pair(location)
        self.at += 1

    def _peek(self, token: str) -> bool:
        return self.text.startswith(token, self.at)

    def _skip(self, pattern: re.Pattern[str]) -> int:
        match = pattern.match(self.text, self.at)
        assert match is not None  # both patterns also match nothing
        self.at = match.end()
        return self.at

    def _take(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self.text, self.at)
        if match is None:
            raise ValueError(f"offset {self.at}: not TOML")
        self.at = match.end()
        return match[0]


def _through_arrays(names: list[str], tables_seen: dict[Location, int]) -> Location:
    """Locations of the names of a header: a parent that is an array of tables means its last element."""
    location: Location = ()
    for depth, name in enumerate(names):
        location = (*location, name)
        if depth < len(names) - 1 and location in tables_seen:
            location = (*location, tables_seen[location])
    return location
