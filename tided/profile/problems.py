"""One finding about a profile, as compilers write it: `file:line:column`, the line, a caret, the rule, a suggestion."""

import unicodedata
from typing import Literal, NamedTuple

import msgspec

from tided.profile.positions import Span

Severity = Literal["error", "note"]

_SHOWN_COLUMNS = 160


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """`line` and `column` count from 1 in characters and always name an existing line. An `error` makes the profile
    invalid; a `note` says what a start would refuse, or what else a person should know."""

    file: str
    line: int
    column: int
    width: int
    severity: Severity
    message: str
    source: str
    rule: str = ""
    suggestion: str = ""

    def render(self) -> str:
        number = str(self.line)
        gutter = " " * (len(number) + 2)
        source, indent, carets = _window(self.source, self.column - 1, self.width)
        lines = [
            f"{self.file}:{self.line}:{self.column}: {self.severity}: {self.message}",
            f" {number} | {source}".rstrip(),
            f"{gutter}| {' ' * indent}{'^' * carets}",
        ]
        labelled = (("rule", self.rule), ("help", self.suggestion))
        return "\n".join([*lines, *(f"{gutter}= {label}: {text}" for label, text in labelled if text)])


class Source(NamedTuple):
    """The text of a profile and the name it is reported under."""

    file: str
    text: str

    def problem(
        self,
        span: Span,
        message: str,
        *,
        rule: str = "",
        suggestion: str = "",
        severity: Severity = "error",
    ) -> Problem:
        start = min(max(span.start, 0), len(self.text))
        begin = self.text.rfind("\n", 0, start) + 1
        if begin == len(self.text) and begin > 0:  # behind the last line end there is no line
            begin, start = self.text.rfind("\n", 0, begin - 1) + 1, begin - 1
        line_end = self.text.find("\n", begin)
        line_end = len(self.text) if line_end < 0 else line_end
        return Problem(
            file=self.file,
            line=self.text.count("\n", 0, begin) + 1,
            column=start - begin + 1,
            width=max(1, min(span.end, line_end) - start),
            severity=severity,
            message=message,
            source=self.text[begin:line_end].removesuffix("\r"),
            rule=rule,
            suggestion=suggestion,
        )


def render(problems: list[Problem]) -> str:
    """All problems, errors first as they stand in the file, and a last line that counts them."""
    errors = sum(problem.severity == "error" for problem in problems)
    tally = (("error", errors), ("note", len(problems) - errors))
    counts = [f"{count} {noun}{'s' * (count > 1)}" for noun, count in tally if count]
    return "\n\n".join([*(problem.render() for problem in problems), ", ".join(counts)])


def in_order(problems: list[Problem]) -> list[Problem]:
    """Errors before notes, each as they stand in the file."""
    return sorted(problems, key=lambda problem: (problem.severity != "error", problem.line, problem.column))


def _window(source: str, offset: int, width: int) -> tuple[str, int, int]:
    """The part of a line to print, the cells before the caret and the number of carets."""
    first = max(0, min(offset - _SHOWN_COLUMNS // 2, len(source) - _SHOWN_COLUMNS))
    shown = "".join(_printable(char) for char in source[first : first + _SHOWN_COLUMNS])
    indent = _cells(shown[: offset - first])
    carets = max(1, _cells(shown[offset - first : offset - first + width]))
    return shown, indent, carets


def _printable(char: str) -> str:
    """A profile is somebody's file: nothing in it may steer the terminal."""
    return " " if char == "\t" else char if char.isprintable() else "?"


def _cells(text: str) -> int:
    return sum(_cell(char) for char in text)


def _cell(char: str) -> int:
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1
