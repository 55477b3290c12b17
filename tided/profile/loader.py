"""A profile's settings, or everything that is wrong with it."""

from pathlib import Path
from typing import Any

import msgspec

from tided.errors import ConfigError
from tided.profile.problems import Problem, in_order, render
from tided.profile.reading import Reading, read
from tided.profile.rules import Values
from tided.profile.schema import SECTIONS
from tided.profile.start import missing, refuse_missing, refuse_unread, unread
from tided.settings import Settings


def load(path: Path | str) -> Settings:
    """The settings of a profile with absolute paths. Raises ConfigError with all problems in compiler form."""
    return _valid(read(Path(path)))


def load_for_start(path: Path | str) -> Settings:
    """The settings that a start goes by: of one reading of the file, whatever is written to it meanwhile. Raises as
    `load`, ConfigError for keys that this build does not act on, DataError for files that are not here."""
    reading = read(Path(path))
    settings = _valid(reading)
    refuse_unread(settings, reading)
    refuse_missing(settings, reading)
    return settings


def check(path: Path | str) -> list[Problem]:
    """Everything wrong with a profile, and as notes what a start of this build on this machine would refuse."""
    reading = read(Path(path))
    if any(problem.severity == "error" for problem in reading.problems):
        return reading.problems
    settings = _settings(reading.values)
    notes = [*unread(settings, reading, "note"), *missing(settings, reading, "note")]
    return in_order([*reading.problems, *notes])


def _valid(reading: Reading) -> Settings:
    errors = [problem for problem in reading.problems if problem.severity == "error"]
    if errors:
        raise ConfigError(render(errors))
    return _settings(reading.values)


def _settings(values: Values) -> Settings:
    tables: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for dotted, value in values.items():
        section, name = dotted.split(".")
        tables[section][name] = value
    return msgspec.convert(tables, Settings)
