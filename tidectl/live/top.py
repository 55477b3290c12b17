"""`tidectl top`: follows a server's events on a thread of its own, and draws what they made few times a second."""

import os
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

import msgspec
from rich.text import Text

from tidectl import http
from tidectl.live.look import ASCII, SPANS_S, WIDE, Glyphs, Look
from tidectl.live.screen import opened
from tidectl.live.sea import Sea
from tidectl.live.view import lines, small_map
from tidectl.output import console, emit, is_terminal, say
from tidectl.running import server_url
from tided.errors import PermissionError_, TideError, UsageError

AGAIN_S = (1.0, 2.0, 4.0, 8.0)
ONCE_COLUMNS, ONCE_ROWS = 80, 40


class Feed:
    """The sea as a server tells of it. `trouble`: why nothing comes now. Use `lock` to look at the sea. A key that is
    refused ends it (`refused`); whatever else goes wrong is tried again."""

    def __init__(self, url: str, key: str) -> None:
        self.sea, self.lock, self.trouble = Sea(), threading.Lock(), ""
        self.refused: TideError | None = None
        self._url, self._key = url, key
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()

    def _follow(self) -> None:
        failures = 0
        while not self._ended.is_set():
            try:
                for name, value in http.expert_events(self._url, self._key):
                    with self.lock:
                        self.sea.take(name, value, time.monotonic())
                    self.trouble, failures = "", 0
                    if self._ended.is_set():
                        return
                self.trouble = "the server has ended the stream"
            except PermissionError_ as error:
                self.refused = error
                return
            except TideError as error:
                self.trouble = error.what
            self._ended.wait(AGAIN_S[min(failures, len(AGAIN_S) - 1)])
            failures += 1


@dataclass
class Choice:
    order: str = ""
    span_s: int = SPANS_S[1]

    def typed(self, key: str) -> bool:
        """Whether to go on."""
        for letter in key.lower():
            if letter in ("q", "\x04"):
                return False
            if letter == "o":
                self.order = {"heat": "number", "number": ""}.get(self.order, "heat")
            elif letter == "s":
                self.span_s = SPANS_S[(SPANS_S.index(self.span_s) + 1) % len(SPANS_S)]
        return True


def run(url: str | None, every_s: float, once: bool, as_json: bool) -> None:
    server, key = server_url(url), os.environ.get("TIDE_API_KEY", "")
    if once or as_json or not is_terminal(sys.stdout):
        show_once(server, key, as_json)
    elif not sys.stdin.isatty():
        raise UsageError("keys are read from a terminal", hint="tidectl top --once")
    else:
        watch(server, key, every_s)


def show_once(url: str, key: str, as_json: bool) -> None:
    sea = Sea()
    for name, value in http.expert_events(url, key, follow=False):
        sea.take(name, value, time.monotonic())
    if as_json:
        emit("top/1", summary(sea, url))
        return
    width = min(os.get_terminal_size().columns, 120) if is_terminal(sys.stdout) else ONCE_COLUMNS
    screen = console(sys.stdout)
    for line in small_map(sea, Look(width, ONCE_ROWS, glyphs(), url=url), time.monotonic()):
        line.truncate(width)
        line.rstrip()
        screen.print(line, soft_wrap=True)


def summary(sea: Sea, url: str) -> dict[str, Any]:
    coverage = sea.coverage()
    return {
        "url": url,
        "model": sea.model,
        "layers": sea.layers,
        "experts": sea.experts,
        "coverage": coverage.covered,
        "substituted": coverage.substituted,
        "expected": sea.samples[-1].held if sea.samples else None,
        "now": None if sea.now is None else msgspec.to_builtins(sea.now),
    }


def watch(url: str, key: str, every_s: float) -> None:
    feed, choice = Feed(url, key), Choice()
    feed.start()
    try:
        with opened() as screen:
            while feed.refused is None:
                width, height = screen.size()
                look = Look(width, height, glyphs(), choice.order, choice.span_s, url, feed.trouble)
                with feed.lock:
                    shown = lines(feed.sea, look, time.monotonic())
                screen.show(drawn(shown))
                if not choice.typed(screen.key(every_s)):
                    return
    except KeyboardInterrupt:
        say("")
        raise SystemExit(130) from None
    finally:
        feed.stop()
    raise feed.refused


def drawn(shown: list[Text]) -> list[str]:
    """As this terminal takes them."""
    screen = console(sys.stdout)
    found = []
    for line in shown:
        with screen.capture() as captured:
            screen.print(line, end="", soft_wrap=True)
        found.append(captured.get())
    return found


def glyphs() -> Glyphs:
    try:
        "".join(WIDE).encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return WIDE
