"""How DeepSeek-V4.1's markers look in a stream of output text, and the search for them.

By token: the stream holds a private character (an unpaired surrogate, which no decoded text holds) for each marker
token, so text that merely spells a marker stays text. By spelling: for stored outputs, whose token ids are gone.
"""

import re
from collections.abc import Sequence

import msgspec

from tided.chat.deepseek_v41_tools import DSML, END_THINK


class Markers(msgspec.Struct, frozen=True):
    end_think: str
    dsml: str


BY_SPELLING = Markers(END_THINK, DSML)
BY_TOKEN = Markers("\udc00", "\udc01")
MARKER_TOKENS = {END_THINK: BY_TOKEN.end_think, DSML: BY_TOKEN.dsml}

# Tags of V4 (no gap, `tool_calls`) count like those of V4.1.
CLOSING_TAGS = tuple(gap + name for gap in (" ", "") for name in ("parameter>", "invoke>", "calls>", "tool_calls>"))
INVOKE = tuple(gap + 'invoke name="' for gap in (" ", ""))


class Patterns:
    """What each state looks for."""

    def __init__(self, markers: Markers) -> None:
        think, dsml = re.escape(markers.end_think), re.escape(markers.dsml)
        tag = "(?:parameter|invoke|calls|tool_calls)>"
        self.close = f"</{markers.dsml}"
        self.invoke = re.compile(rf'(?:<{dsml} ?)?invoke name="')
        self.close_invoke = re.compile(f"</{dsml} ?invoke>")
        self.calls = re.compile(rf'(?P<invoke>(?:<{dsml} ?)?invoke name=")|(?P<end></{dsml} ?(?:tool_)?calls>)')
        self.args = re.compile(
            rf'(?P<parameter>parameter name=")|(?P<close></{dsml})|(?P<invoke><{dsml} ?invoke name=")'
        )
        self.parameter_flag = re.compile(r'"(?: string="?(true|false)"?)?>')
        self._bare = re.compile(f"(?P<think>{think})")
        self._full = re.compile(f"(?P<think>{think})|(?P<open><{dsml})|(?P<stray></{dsml} ?{tag})")
        self._bare_literals = (markers.end_think,)
        self._full_literals = (
            markers.end_think,
            f"<{markers.dsml}",
            *(self.close + closing for closing in CLOSING_TAGS),
        )

    def find_in_text(self, buffer: str, with_tools: bool) -> re.Match[str] | None:
        return (self._full if with_tools else self._bare).search(buffer)

    def held(self, buffer: str, with_tools: bool, with_newlines: bool) -> int:
        """How much of the buffer's end may still become a marker, or be the newlines that belong to it."""
        keep = partial(buffer, self._full_literals if with_tools else self._bare_literals)
        before = buffer[: len(buffer) - keep]
        return keep + (len(before) - len(before.rstrip("\n")) if with_newlines else 0)


def partial(text: str, markers: Sequence[str]) -> int:
    """Length of the longest end of `text` that is a proper beginning of a marker."""
    longest = min(len(text), max(map(len, markers)) - 1)
    return next((n for n in range(longest, 0, -1) if any(m.startswith(text[-n:]) for m in markers)), 0)


def closing_tag(rest: str, final: bool) -> str | None:
    """The tag that `rest`, which follows `</｜DSML｜`, spells; "" for none; None while more text must decide."""
    if tag := next((tag for tag in CLOSING_TAGS if rest.startswith(tag)), ""):
        return tag
    waits = not final and any(tag.startswith(rest) for tag in CLOSING_TAGS)
    return None if waits else ""


def spelled(text: str) -> str:
    """`text` with private characters as the tokens they stand for."""
    for spelling, private in MARKER_TOKENS.items():
        text = text.replace(private, spelling)
    return text
