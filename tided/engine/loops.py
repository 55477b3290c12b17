"""Answers that go round in circles: a cycle of tokens that came N times in a row ends its answer.

What is watched are the tokens alone. For every period p up to `LONGEST_TOKENS` a counter holds how many of the newest
tokens each equal the one p before it; N copies of a cycle of p tokens are there when it reaches (N - 1) * p. A token
costs a handful of array operations, whatever was said before.

Data repeats too: equal rows of a CSV file, a table's rule, zeros of a matrix, brackets of nested JSON. Whether a cycle
is data is read from its text, and only when it has come N times: text without letters is, rows of cells are, whatever
their cells say, and so are short fields between separators, where no sentence ends. Data may come `DATA_PATIENCE` times
as often, not for ever. A cycle with a special token in it (a tool call, the end of a thought) is never data.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

LONGEST_TOKENS = 512  # of a cycle that is seen
DATA_PATIENCE = 32  # 12 times for words are 384 for rows of data
FIELD_WORDS = 2  # a mark, on average: "New York,London" is data, "Wait, let me look at it again" is not

_UNSPACED = "\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff"  # scripts that put no blank between words: two letters are one
_WORD = re.compile(rf"[{_UNSPACED}]{{1,2}}|[^\W\d_{_UNSPACED}]+")
_SEPARATOR = re.compile(r"\d+|[,;|:=(){}\[\]\t]|</|/>|[\u2500-\u257f]+")
_LINES = re.compile(r"\n+")
_SENTENCE_END = re.compile(r"""[^\W\d_][.!?…]+["')\]»”*_]*\s|[。！？]""")
_GAP = re.compile(r"(?<=[^\W_])[\W_]")
# What parts the cells of a row. Prose puts a blank behind a comma, or behind the quote or the stars that follow it; it
# has no tab inside a line, and no single bar.
_CLOSERS = r""""')\]”’»*_"""
_CELL = re.compile(rf"[,;](?=[{_CLOSERS}]*[^\s{_CLOSERS}])|(?<=\S)\t+(?=\S)|(?<!\|)\|(?!\|)|[│┃║]")
# Where prose has such marks all the same: behind a list's bullet, in code, in an entity, in 1,024 and 3,50, and between
# letters of a script without blanks.
_PROSE_MARK = re.compile(
    rf"^[ \t]*(?:[-*+•]|\w+[.)])[ \t]+|`[^`\n]*`|&#?\w+;|(?<=\d),(?=\d)|(?<=[{_UNSPACED}]),(?=[{_UNSPACED}])", re.M
)


class Loop(NamedTuple):
    """A cycle of so many tokens has come so many times in a row."""

    tokens: int
    repeats: int


class LoopWatch:
    """Of one answer. `repeats` (2 or more): how often a cycle of words may come. `texts`: the bytes of each token id,
    None for special ones; of an id beyond them nothing is known, and it is taken for a special one."""

    def __init__(self, repeats: int, texts: Sequence[bytes | None]) -> None:
        periods = np.arange(1, LONGEST_TOKENS + 1)
        self._repeats, self._texts = repeats, texts
        self._words = ((repeats - 1) * periods).astype(np.int32)
        self._data = ((repeats * DATA_PATIENCE - 1) * periods).astype(np.int32)
        self._run = np.zeros(LONGEST_TOKENS, np.int32)  # by period - 1: tokens that equal the one a period before
        # The newest tokens lie before `_end`; when the end is reached they are moved to the front.
        self._recent = np.full(8 * LONGEST_TOKENS, -1, np.int32)
        self._end = LONGEST_TOKENS

    def feed(self, token: int) -> Loop | None:
        """The answer's next token; a loop if it completes one, of the shortest cycle."""
        before = self._recent[self._end - LONGEST_TOKENS : self._end][::-1]
        self._run += 1
        self._run *= before == token
        self._keep(token)
        full = np.flatnonzero((self._run == self._words) | (self._run == self._data))
        for period in (full + 1).tolist():
            patient = self._run[period - 1] < self._data[period - 1]
            if not patient or not self._is_data(self._recent[self._end - period : self._end]):
                return Loop(period, int(self._run[period - 1]) // period + 1)
        return None

    def _keep(self, token: int) -> None:
        if self._end == len(self._recent):
            self._recent[:LONGEST_TOKENS] = self._recent[-LONGEST_TOKENS:]
            self._end = LONGEST_TOKENS
        self._recent[self._end] = token
        self._end += 1

    def _is_data(self, cycle: "np.ndarray[tuple[int], np.dtype[np.int32]]") -> bool:
        known = [self._texts[token] if token < len(self._texts) else None for token in cycle.tolist()]
        pieces = [piece for piece in known if piece is not None]
        return len(pieces) == len(known) and is_data(b"".join(pieces))


def is_data(cycle: bytes) -> bool:
    """Whether the text of a cycle is data and not language. It does not matter where the cycle is cut."""
    text = _from_a_gap(cycle)
    words = len(_WORD.findall(text))
    if not words or _is_rows(cycle):
        return True
    separators = len(_SEPARATOR.findall(text))
    if not separators or _SENTENCE_END.search(2 * text):
        return False
    return words <= FIELD_WORDS * (separators + len(_LINES.findall(text)))


def _is_rows(cycle: bytes) -> bool:
    """Whether each line that has words has cells. A cycle inside a line is no row."""
    before, newline, after = cycle.partition(b"\n")
    if not newline:
        return False
    lines = _PROSE_MARK.sub("x", (after + before).decode("utf-8", "replace")).split("\n")
    return all(_CELL.search(line) or not _WORD.search(line) for line in lines)


def _from_a_gap(cycle: bytes) -> str:
    """The cycle's text, turned so that it begins behind a word or a number and not inside one, nor inside a
    character."""
    start = next((at for at, byte in enumerate(cycle) if byte & 0xC0 != 0x80), 0)
    text = (cycle[start:] + cycle[:start]).decode("utf-8", "replace")
    gap = _GAP.search(2 * text)
    at = gap.start() % len(text) if gap else 0
    return text[at:] + text[:at]
