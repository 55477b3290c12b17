"""How GLM-5.3's markers look in a stream of output text.

By token: a private character (an unpaired surrogate, which no decoded text holds) for each marker token. By spelling:
for stored outputs, whose token ids are gone.
"""

import re
from collections.abc import Iterable

from tided.chat.glm53 import CALL_TAGS, END_THINK, STOPS

MARKER_TOKENS = {spelling: chr(0xDC10 + at) for at, spelling in enumerate((END_THINK, *CALL_TAGS, *STOPS))}


class Tags:
    """What each state looks for. `by_token`: private characters, else spellings."""

    def __init__(self, *, by_token: bool) -> None:
        marks = MARKER_TOKENS if by_token else {spelling: spelling for spelling in MARKER_TOKENS}
        self.end_think = marks[END_THINK]
        self.call, self.end_call, self.key, self.end_key, self.value, self.end_value = (marks[tag] for tag in CALL_TAGS)
        self.stops = tuple(marks[stop] for stop in STOPS)
        self.tags = tuple(marks[tag] for tag in CALL_TAGS)
        self.all = tuple(marks.values())
        self._private = {private: spelling for spelling, private in MARKER_TOKENS.items()} if by_token else {}
        self.after_name = _either((self.key, self.end_key, self.value, self.end_call, self.call))
        self.after_key = _either((self.end_key, self.value))
        self.in_args = _either((self.key, self.end_call, self.call))

    def spelled(self, text: str) -> str:
        """`text` with private characters as the tokens they stand for."""
        for private, spelling in self._private.items():
            text = text.replace(private, spelling)
        return text


def _either(tags: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, tags)))
