"""What the lines of `tidectl top` are made of: sizes, signs, styles."""

from collections.abc import Sequence
from typing import NamedTuple

from rich.text import Text

from tidectl.live.sea import HOT, LOADING, MISSING

LEAST_COLUMNS, LEAST_ROWS = 40, 12
SPANS_S = (120, 300, 900)
LABEL = 9


class Glyphs(NamedTuple):
    """`shares`: of a place that stands for several experts, from none resident to all. `levels`: of a line."""

    resident: str
    hot: str
    loading: str
    missing: str
    wanted: str
    shares: str
    levels: str
    came: str
    left: str


WIDE = Glyphs("█", "◆", "▄", "·", "○", "·░▒▓█", "▁▂▃▄▅▆▇█", "▲", "▽")
ASCII = Glyphs("#", "@", "+", ".", "o", ".:-=#", "_.-~=*%#", "^", "v")

RESIDENT_STYLES = ("color(24)", "color(31)", "color(38)", "color(80)")  # by heat; blue to light cyan
STYLES = {HOT: "color(214)", LOADING: "bold color(231)", MISSING: "color(239)"}


class Look(NamedTuple):
    """What the viewer has chosen. `order`: "number" or "heat"; "": as suits the size."""

    width: int
    height: int
    glyphs: Glyphs = WIDE
    order: str = ""
    span_s: int = 300
    url: str = ""
    trouble: str = ""


def joined(parts: Sequence[Text | str], width: int, gap: str = "   ") -> Text:
    """As many as fit, the first ones first."""
    found = Text("")
    for part in parts:
        more = part if isinstance(part, Text) else Text(part)
        if found.cell_len + len(gap) + more.cell_len > width and found.plain:
            continue
        found = found + gap + more if found.plain else found + more
    return found


def label_of(word: str) -> Text:
    return styled(f"{word:<{LABEL}}", "dim")


def styled(text: str, style: str) -> Text:
    """A style of this text alone: what is added to it has none."""
    return Text().append(text, style)
