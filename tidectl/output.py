"""What a person and what a program sees: data on stdout, words on stderr, colour on a terminal only. rich draws; it is
imported where something is drawn, because most commands and every help text do without."""

import json
import os
import sys
import unicodedata
from typing import TYPE_CHECKING, Any, TextIO

from tided.errors import TideError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

UNCUT_COLUMNS = 10_000  # off a terminal nothing is wrapped


def say(words: str, style: str = "") -> None:
    print(styled(visible(words), style, sys.stderr), file=sys.stderr, flush=True)


def emit(schema: str, data: dict[str, Any]) -> None:
    """One JSON object on stdout. `schema` names its form; a form only ever gains keys under the same number."""
    print(json.dumps({"schema": f"tidectl.{schema}", **data}, ensure_ascii=False), flush=True)


def report(error: TideError) -> None:
    """An error of ours: what, where, and the next step. Compiler form names its severity by itself."""
    label = "" if ": error: " in error.what.partition("\n")[0] else f"{styled('error', 'bold red', sys.stderr)}: "
    print(f"{label}{visible(str(error))}", file=sys.stderr, flush=True)


def is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def has_style(stream: TextIO) -> bool:
    return is_terminal(stream) and not os.environ.get("NO_COLOR")


def styled(text: str, style: str, stream: TextIO) -> str:
    """`text` in one of rich's styles ("bold red"), where the stream shows styles. Tabs and line ends stay as they are,
    which a console would lay out."""
    if not style or not has_style(stream):
        return text
    from rich.color import ColorSystem
    from rich.style import Style

    return Style.parse(style).render(text, color_system=ColorSystem.STANDARD)


def console(stream: TextIO) -> "Console":
    """For tables and what moves. It takes a string for nothing but itself: no markup, emoji or highlighting."""
    from rich.console import Console

    terminal = is_terminal(stream)
    return Console(
        file=stream,
        force_terminal=terminal,  # by our rule alone, whatever FORCE_COLOR says
        color_system="auto" if has_style(stream) else None,
        width=None if terminal else UNCUT_COLUMNS,
        markup=False,
        emoji=False,
        highlight=False,
    )


def plain(text: str, style: str = "") -> "Text":
    """A cell of a table. rich keeps escape characters; `visible` does not."""
    from rich.text import Text

    return Text(visible(text), style)


def visible(text: str) -> str:
    """`text` without what would steer a terminal: a model's answer is data, whatever it contains."""
    return "".join(char for char in text if char in "\n\t" or not _steers(char))


def _steers(char: str) -> bool:
    """Control characters, halves of characters, and those that turn the writing direction round."""
    return (
        unicodedata.category(char) in ("Cc", "Cs") or char in "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
    )
