"""Reading: text -> tables -> values by dotted key, with every problem on the way collected, none raised."""

import difflib
import os.path
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import tomli

from tided.errors import ConfigError, PermissionError_
from tided.profile.positions import Location, Positions, Span, locate
from tided.profile.problems import Problem, Severity, Source, in_order
from tided.profile.rules import RULES, Values, faults_of, nearest
from tided.profile.schema import KEYS, SECTIONS, Key

MAX_BYTES = 1 << 20  # a profile is a page of text; anything larger is another file
MAX_DIGITS = sys.get_int_max_str_digits()
_LONG_NUMBER = re.compile(rf"[0-9](?:_?[0-9]){{{MAX_DIGITS},}}")


class Reading(NamedTuple):
    """A profile as far as it could be read. `values` holds each key that is valid, written or default."""

    source: Source
    positions: Positions
    values: Values
    problems: list[Problem]

    def span(self, dotted: str) -> Span:
        """Where a key stands; for one that is not written, its section's header, else the end of the file."""
        section, name = dotted.split(".")
        keys = self.positions.keys
        return keys.get((section, name)) or keys.get((section,)) or Span(len(self.source.text), len(self.source.text))

    def report(self, span: Span, message: str, rule: str, suggestion: str = "", severity: Severity = "error") -> None:
        self.problems.append(self.source.problem(span, message, rule=rule, suggestion=suggestion, severity=severity))


def read(path: Path) -> Reading:
    """Read and judge a profile. Raises only where there is no text: a file that is absent, closed to us, no file."""
    source, encoding_problem = _text_of(path)
    if encoding_problem:
        return Reading(source, Positions({}, {}), {}, [encoding_problem])
    try:
        tables = tomli.loads(source.text)
        positions = locate(source.text)
    except tomli.TOMLDecodeError as error:
        return Reading(source, Positions({}, {}), {}, [_syntax(source, error)])
    except ValueError:  # an integer longer than Python reads
        return Reading(source, Positions({}, {}), {}, [_endless(source)])
    except RecursionError:
        problem = source.problem(Span(0, 0), "arrays or tables nested too deeply", rule="a profile has two levels")
        return Reading(source, Positions({}, {}), {}, [problem])
    reading = Reading(source, positions, {}, [])
    _read_tables(reading, tables, path.absolute().parent)
    _read_rules(reading)
    return reading._replace(problems=in_order(reading.problems))


def _text_of(path: Path) -> tuple[Source, Problem | None]:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except PermissionError as error:
        raise PermissionError_("this user may not read the profile", where=str(path)) from error
    except OSError as error:
        hint = "`tidectl profile list` names the profiles that come with TideLM"
        raise ConfigError(f"no profile can be read here ({error.strerror})", where=str(path), hint=hint) from error
    if len(data) > MAX_BYTES:
        raise ConfigError(f"over {MAX_BYTES} bytes, so this is no profile", where=str(path))
    try:
        # With newline translation offsets would be those of another text; TOML itself knows both line ends.
        return Source(str(path), data.decode("utf-8-sig")), None
    except UnicodeDecodeError as error:
        source = Source(str(path), data.decode("utf-8", errors="replace"))
        offset = len(data[: error.start].decode("utf-8"))
        return source, source.problem(Span(offset, offset + 1), "not UTF-8 text", rule="a profile is UTF-8")


def _syntax(source: Source, error: tomli.TOMLDecodeError) -> Problem:
    lines = source.text.replace("\r\n", "\n").split("\n")
    # The parser counts in text without "\r"; both texts have the same lines and, before the line's end, columns.
    before = source.text.split("\n")[: error.lineno - 1]
    offset = sum(len(line) + 1 for line in before) + min(error.colno - 1, len(lines[error.lineno - 1]))
    return source.problem(
        Span(offset, offset + 1), error.msg[0].lower() + error.msg[1:], rule="TOML, see https://toml.io"
    )


def _endless(source: Source) -> Problem:
    found = _LONG_NUMBER.search(source.text)
    span = Span(*found.span()) if found else Span(0, 0)
    return source.problem(span, "a number of so many digits", rule=f"an integer has at most {MAX_DIGITS} digits")


def _read_tables(reading: Reading, tables: dict[str, Any], base: Path) -> None:
    for name, table in tables.items():
        if name not in SECTIONS:
            _unknown_section(reading, name, table)
        elif not isinstance(table, dict):
            span = _at(reading, (name,))
            reading.report(span, f"'{name}' must be a table", rule=f"write [{name}] on a line of its own")
        else:
            for key in table.keys() - SECTIONS[name].keys():
                _unknown_key(reading, name, key)
    for key in KEYS:
        table = tables.get(key.section, {})
        if isinstance(table, dict):
            _read_key(reading, key, table, base)


def _read_key(reading: Reading, key: Key, table: dict[str, Any], base: Path) -> None:
    if key.name not in table:
        if key.required:
            rule = f"{key.dotted}: {key.text}"
            reading.report(reading.span(key.dotted), f"missing key '{key.dotted}'", rule=rule)
        else:
            reading.values[key.dotted] = key.default
        return
    faults = list(faults_of(key, table[key.name]))
    for fault in faults:
        element: Location = () if fault.element is None else (fault.element,)
        location = (key.section, key.name, *element)
        span = reading.positions.values.get(location) or _at(reading, location)
        reading.report(span, fault.message, fault.rule, fault.suggestion)
    if not faults:
        value = msgspec.convert(table[key.name], key.type)
        reading.values[key.dotted] = _absolute(value, base) if key.path else value


def _read_rules(reading: Reading) -> None:
    for rule in RULES:
        if any(key not in reading.values for key in rule.keys):
            continue
        message = rule.broken(*(reading.values[key] for key in rule.keys))
        if message:
            written = [key for key in rule.keys if tuple(key.split(".")) in reading.positions.keys]
            span = reading.span((*written, rule.keys[0])[0])
            reading.report(span, message, rule=rule.text, severity=rule.severity)


def _unknown_section(reading: Reading, name: str, table: Any) -> None:
    kind = "section" if isinstance(table, dict | list) else "key"
    homes = [key.dotted for key in KEYS if key.name == name]
    suggestion = f"'{name}' belongs to [{homes[0].split('.')[0]}]" if homes else nearest(name, list(SECTIONS))
    rule = "the sections are " + ", ".join(SECTIONS)
    span = _at(reading, (name,))
    reading.report(span, f"unknown {kind} '{_short(name)}'", rule=rule, suggestion=suggestion)


def _unknown_key(reading: Reading, section: str, name: str) -> None:
    homes = [key.section for key in KEYS if key.name == name]
    suggestion = f"'{name}' belongs to [{homes[0]}]" if homes else nearest(name, list(SECTIONS[section]))
    if not suggestion:
        close = difflib.get_close_matches(name, [key.name for key in KEYS], n=1)
        suggestion = next((f"did you mean '{key.dotted}'?" for key in KEYS if key.name in close), "")
    rule = f"[{section}] has the keys " + ", ".join(SECTIONS[section])
    span = _at(reading, (section, name))
    reading.report(span, f"unknown key '{section}.{_short(name)}'", rule=rule, suggestion=suggestion)


def _short(name: str) -> str:
    shown = name if len(name) <= 60 else name[:57] + "..."
    return shown if shown.isprintable() else ascii(shown)[1:-1]


def _at(reading: Reading, location: Location) -> Span:
    """Where a location is written, or the nearest one above it that is."""
    while location:
        if location in reading.positions.keys:
            return reading.positions.keys[location]
        location = location[:-1]
    return Span(0, 0)


def _absolute(value: str, base: Path) -> str:
    """Against the profile's directory. Not `resolve()`: a symbolic link to a checkpoint keeps its own name."""
    expanded = os.path.expanduser(value)  # noqa: PTH111  Path's raises for a user that does not exist
    return os.path.normpath(base / expanded) if value else ""
