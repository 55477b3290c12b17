"""An answer on a terminal while it comes: markdown drawn, thinking folded to a line, and a line that tells how fast it
grows.

What is finished, a paragraph, a list, a block of code, is printed once and scrolls away like any output. Only what is
still growing is drawn again.
"""

import sys
import time
from collections import deque

from rich.console import Group, RenderableType
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.text import Text

from tidectl.output import console, visible

SPAN_S = 3.0
REFRESH_S = 0.125
FENCES = ("```", "~~~")


class MarkdownScreen:
    """What `answers.Screen` is off a terminal. `thoughts`: the thinking of the newest answer."""

    def __init__(self) -> None:
        self.thoughts = ""
        self._console = console(sys.stdout)
        self._live: Live | None = None
        self._growing = ""  # markdown that may go on
        self._began_s: float | None = None
        self._thought_s = 0.0
        self._folded = self._printed = False
        self._tokens: deque[tuple[float, int]] = deque()

    def show(self, thought: str, text: str) -> None:
        now_s = time.monotonic()
        if thought:
            self._began_s = now_s if self._began_s is None else self._began_s
            self._thought_s = now_s - self._began_s
            self.thoughts += thought
        if text:
            self._fold()
            self._growing += visible(text)
            self._print_finished()
        if thought or text:
            self._draw()

    def count(self, tokens: int) -> None:
        """So many tokens have come."""
        now_s = time.monotonic()
        self._tokens.append((now_s, tokens))
        while len(self._tokens) > 2 and now_s - self._tokens[0][0] > SPAN_S:
            self._tokens.popleft()

    def end(self) -> None:
        """Whatever ended the answer."""
        self._fold()
        if self._live is not None:
            self._live.update(Text(""), refresh=False)
            self._live.stop()
            self._live = None
        if self._growing.strip():
            self._print(self._growing)
        self._growing = ""

    def _fold(self) -> None:
        if self.thoughts and not self._folded:
            self._folded = True
            self._out(Text(f"thought for {self._thought_s:.1f} s, {len(self.thoughts.split())} words", "dim italic"))

    def _print_finished(self) -> None:
        done, self._growing = split(self._growing)
        if done:
            self._print(done)

    def _print(self, markdown: str) -> None:
        if self._printed:
            self._out(Text(""))
        self._printed = True
        self._out(joined(self._lines(markdown)))

    def _out(self, what: RenderableType) -> None:
        (self._live.console if self._live is not None else self._console).print(what)

    def _draw(self) -> None:
        if self._live is None:
            self._live = Live(console=self._console, transient=True, refresh_per_second=1 / REFRESH_S)
            self._live.start()
        parts: list[RenderableType] = []
        if self._growing.strip():
            parts += [Text("")] if self._printed else []
            parts.append(self._tail())
        elif self.thoughts and not self._folded:
            parts.append(Text(f"thinking, {len(self.thoughts.split())} words", "dim italic"))
        self._live.update(Group(*parts, Text(self.status(), "dim")))

    def _tail(self) -> Text:
        """The last lines of what grows: what does not fit on the screen cannot be drawn again."""
        return joined(self._lines(self._growing)[-max(3, self._console.height - 4) :])

    def _lines(self, markdown: str) -> list[list[Segment]]:
        """As drawn, without empty ones at either end: rich puts some around lists and code."""
        lines = self._console.render_lines(rendered(markdown), pad=False)
        filled = [at for at, line in enumerate(lines) if "".join(segment.text for segment in line).strip()]
        return lines[filled[0] : filled[-1] + 1] if filled else []

    def status(self) -> str:
        if len(self._tokens) < 2:
            return ""
        (first_s, first), (last_s, last) = self._tokens[0], self._tokens[-1]
        speed = f", {(last - first) / (last_s - first_s):.1f} tok/s" if last_s > first_s else ""
        return f"{last:,} tokens{speed}"


def rendered(markdown: str) -> Markdown:
    """Addresses of links stand beside their words: a terminal would hide them."""
    return Markdown(markdown, hyperlinks=False)


def joined(lines: list[list[Segment]]) -> Text:
    found = Text()
    for at, line in enumerate(lines):
        found.append("\n" if at else "")
        for segment in line:
            found.append(segment.text, segment.style)
    return found


def split(markdown: str) -> tuple[str, str]:
    """What is finished, and what may go on. A block ends with an empty line outside of a fence; a list goes on behind
    one, so its end is known with the first line that is none of it."""
    lines = markdown.split("\n")
    fence, cut = "", 0
    for at, line in enumerate(lines[:-1]):  # the last line may still grow
        bare = line.strip()
        if fence:
            if bare.startswith(fence) and not bare.strip(fence[0]):
                fence, cut = "", at + 1
        elif bare.startswith(FENCES):
            fence = bare[: len(bare) - len(bare.lstrip(bare[0]))]
        elif not bare and at and not _may_go_on(lines, cut, at):
            cut = at + 1
    done = "\n".join(lines[:cut])
    return (done, "\n".join(lines[cut:])) if done.strip() else ("", markdown)


def _may_go_on(lines: list[str], begin: int, empty: int) -> bool:
    """Whether lines `begin` to `empty` are a list that the next line, which is not known yet or is indented or an item,
    may be part of."""
    first = next((line for line in lines[begin:empty] if line.strip()), "")
    if not _is_item(first):
        return False
    after = next((line for line in lines[empty + 1 : -1] if line.strip()), None)
    return after is None or _is_item(after) or after.startswith((" ", "\t"))


def _is_item(line: str) -> bool:
    word, _, rest = line.strip().partition(" ")
    return bool(rest) and (word in ("-", "*", "+") or word.rstrip(".)").isdigit())
