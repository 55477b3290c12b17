"""A chat completion as it arrives: read by type, shown while it comes, added up at the end."""

import sys
import time
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import msgspec

from tidectl.output import is_terminal, say, styled, visible
from tided.errors import TideError


class Text(msgspec.Struct):
    """`reasoning`: what some servers call it."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    @property
    def thought(self) -> str:
        return self.reasoning_content or self.reasoning or ""


class Choice(msgspec.Struct):
    """`delta` in a stream, `message` otherwise."""

    delta: Text = msgspec.field(default_factory=Text)
    message: Text = msgspec.field(default_factory=Text)
    finish_reason: str | None = None


class Part(msgspec.Struct):
    """A chunk of a stream, or the whole reply."""

    choices: list[Choice]
    usage: dict[str, Any] | None = None
    x_engine_stats: dict[str, Any] | None = None


class Answer(NamedTuple):
    content: str
    reasoning: str
    finish_reason: str | None
    usage: dict[str, Any]
    stats: dict[str, Any]


class Shows(Protocol):
    """Where an answer is shown while it comes."""

    def show(self, thought: str, text: str) -> None: ...

    def count(self, tokens: int) -> None:
        """So many tokens have come by now, where the server tells."""
        ...

    def end(self) -> None: ...


class Pace:
    """How long the answer grew, by this clock, for servers that do not tell."""

    def __init__(self) -> None:
        self.first_s = self.last_s = 0.0

    def came(self) -> None:
        self.last_s = time.monotonic()
        self.first_s = self.first_s or self.last_s

    def tok_s(self, tokens: object) -> float | None:
        seconds = self.last_s - self.first_s
        return (tokens - 1) / seconds if isinstance(tokens, int) and tokens > 1 and seconds > 0 else None


class Screen:
    """The answer goes to stdout, the thinking before it to stderr, each from the start of a line, on a terminal with
    a line between them."""

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet
        self.open_line = ""  # the kind of text that the line under the cursor holds
        self.thought = False  # the last that was shown is thinking

    def show(self, thought: str, text: str) -> None:
        self._write("thought", thought)
        self._write("text", text)

    def count(self, tokens: int) -> None:
        """Told at the end alone."""

    def end(self) -> None:
        if self.open_line:
            print(file=sys.stdout if self.open_line == "text" else sys.stderr, flush=True)
        self.open_line = ""

    def _write(self, kind: str, text: str) -> None:
        if self.quiet or not text:
            return
        if self.open_line not in ("", kind):
            self.end()
        if self.thought and kind == "text" and is_terminal(sys.stderr):
            print(file=sys.stderr, flush=True)
        self.thought = kind == "thought"
        if kind == "text":
            print(visible(text) if is_terminal(sys.stdout) else text, end="", flush=True)
        else:
            print(styled(visible(text), "dim", sys.stderr), end="", file=sys.stderr, flush=True)
        self.open_line = "" if text.endswith("\n") else kind


def receive(parts: Iterable[Any], screen: Shows, where: str, pace: Pace | None = None) -> Answer:
    """All parts of one answer. Whatever ends it early, the line that was begun is ended."""
    content, reasoning = "", ""
    finish_reason, usage, stats = None, dict[str, Any](), dict[str, Any]()
    try:
        for part in (read_part(raw, where) for raw in parts):
            usage, stats = part.usage or usage, part.x_engine_stats or stats
            if part.usage and isinstance(tokens := part.usage.get("completion_tokens"), int):
                screen.count(tokens)
            for choice in part.choices:
                finish_reason = choice.finish_reason or finish_reason
                for text in (choice.delta, choice.message):
                    if pace is not None and (text.thought or text.content):
                        pace.came()
                    screen.show(text.thought, text.content or "")
                    reasoning, content = reasoning + text.thought, content + (text.content or "")
    finally:
        screen.end()
    return Answer(content, reasoning, finish_reason, usage, stats)


def tell_cost(answer: Answer, pace: Pace | None = None) -> None:
    if answer.finish_reason == "length":
        say("(cut: max_tokens or the context was reached)", "dim")
    if line := statistics_line(answer, pace):
        say(line, "dim")


def statistics_line(answer: Answer, pace: Pace | None = None) -> str:
    """What an answer cost, in one line; a figure that the server did not give is left out, but for the speed: that of a
    server that tells none is measured here."""
    stats = answer.stats
    experts = stats["experts"] if isinstance(stats.get("experts"), dict) else {}
    spec = stats["spec"] if isinstance(stats.get("spec"), dict) else {}
    tokens = answer.usage.get("completion_tokens")
    drafted = spec.get("drafted")
    measured = None if "decode_tok_s" in stats or pace is None else pace.tok_s(tokens)
    parts = [
        _figure(answer.usage.get("prompt_tokens"), "{} prompt tokens"),
        _figure(tokens, "{} tokens"),
        _figure(stats.get("ttft_s"), "first after {:.2f} s"),
        _figure(stats.get("decode_tok_s"), "{:.1f} tok/s"),
        _figure(measured, "{:.1f} tok/s as measured here"),
        _figure(spec.get("accepted"), f"{{}} of {drafted} drafts taken") if drafted else "",
        _figure(experts.get("resident"), f"{{}} of {experts.get('total', '?')} experts resident"),
        _figure(stats.get("substituted_weight_share"), "{:.1%} of the routing weight substituted"),
        f"fidelity {stats['fidelity']}" if isinstance(stats.get("fidelity"), str) else "",
    ]
    return ", ".join(part for part in parts if part)


def _figure(value: object, form: str) -> str:
    return form.format(value) if isinstance(value, int | float) and not isinstance(value, bool) else ""


def read_part(raw: Any, where: str) -> Part:
    try:
        return msgspec.convert(raw, Part)
    except msgspec.ValidationError as error:
        raise TideError(f"the server's answer is not a chat completion ({error})", where=where) from error
