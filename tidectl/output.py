"""What a person and what a program sees: data on stdout, words on stderr, colour and progress on a terminal only."""

import json
import os
import shutil
import sys
import time
import unicodedata
from typing import Any, TextIO

from tided.errors import TideError

LINE_EVERY_S = 10.0


def say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def emit(schema: str, data: dict[str, Any]) -> None:
    """One JSON object on stdout. `schema` names its form; a form only ever gains keys under the same number."""
    print(json.dumps({"schema": f"tidectl.{schema}", **data}, ensure_ascii=False), flush=True)


def is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def styled(text: str, code: str, stream: TextIO) -> str:
    """`text` in the terminal style `code`, where the stream is a terminal and NO_COLOR is not set."""
    if not is_terminal(stream) or os.environ.get("NO_COLOR"):
        return text
    return f"\x1b[{code}m{text}\x1b[0m"


def dim(text: str) -> str:
    return styled(text, "2", sys.stderr)


def visible(text: str) -> str:
    """`text` without what would steer a terminal: a model's answer is data, whatever it contains."""
    return "".join(char for char in text if char in "\n\t" or not _steers(char))


def _steers(char: str) -> bool:
    """Control characters, halves of characters, and those that turn the writing direction round."""
    return (
        unicodedata.category(char) in ("Cc", "Cs") or char in "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
    )


class Progress:
    """One line that says what is waited for: rewritten on a terminal, elsewhere the first and then one each 10 s."""

    def __init__(self) -> None:
        self.terminal = is_terminal(sys.stderr)
        self.started = time.monotonic()
        self.printed: float | None = None

    def __call__(self, text: str) -> None:
        now = time.monotonic()
        line = f"{text} ({now - self.started:.0f} s)"
        if self.terminal:
            columns = shutil.get_terminal_size().columns  # a line that wraps cannot be rewritten
            print(f"\r\x1b[K{line[: columns - 1]}", end="", file=sys.stderr, flush=True)
        elif self.printed is not None and now - self.printed < LINE_EVERY_S:
            return
        else:
            say(line)
        self.printed = now

    def close(self) -> None:
        if self.terminal and self.printed is not None:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def report(error: TideError) -> None:
    """An error of ours: what, where, and the next step. Compiler form names its severity by itself."""
    label = "" if ": error: " in error.what.partition("\n")[0] else f"{styled('error', '1;31', sys.stderr)}: "
    say(f"{label}{visible(str(error))}")
