"""A chat completion as it arrives: read by type, shown while it comes, added up at the end."""

import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from tidectl.output import is_terminal, say, styled, visible
from tided.errors import TideError


class Text(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


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


def receive(parts: Iterable[Any], screen: Screen, where: str) -> Answer:
    """All parts of one answer. Whatever ends it early, the line that was begun is ended."""
    content, reasoning = "", ""
    finish_reason, usage, stats = None, dict[str, Any](), dict[str, Any]()
    try:
        for part in (read_part(raw, where) for raw in parts):
            usage, stats = part.usage or usage, part.x_engine_stats or stats
            for choice in part.choices:
                finish_reason = choice.finish_reason or finish_reason
                for text in (choice.delta, choice.message):
                    screen.show(text.reasoning_content or "", text.content or "")
                    reasoning, content = reasoning + (text.reasoning_content or ""), content + (text.content or "")
    finally:
        screen.end()
    return Answer(content, reasoning, finish_reason, usage, stats)


def tell_cost(answer: Answer) -> None:
    if answer.finish_reason == "length":
        say("(cut: max_tokens or the context was reached)", "dim")
    say(statistics_line(answer), "dim")


def statistics_line(answer: Answer) -> str:
    """What an answer cost, in one line; a figure that the server did not give is left out."""
    stats = answer.stats
    experts = stats["experts"] if isinstance(stats.get("experts"), dict) else {}
    parts = [
        _figure(answer.usage.get("prompt_tokens"), "{} prompt tokens"),
        _figure(answer.usage.get("completion_tokens"), "{} tokens"),
        _figure(stats.get("ttft_s"), "first after {:.2f} s"),
        _figure(stats.get("decode_tok_s"), "{:.1f} tok/s"),
        _figure(experts.get("resident"), f"{{}} of {experts.get('total', '?')} experts resident"),
        _figure(stats.get("substituted_weight_share"), "{:.1%} of the routing weight substituted"),
    ]
    return ", ".join(part for part in parts if part)


def _figure(value: object, form: str) -> str:
    return form.format(value) if isinstance(value, int | float) and not isinstance(value, bool) else ""


def read_part(raw: Any, where: str) -> Part:
    try:
        return msgspec.convert(raw, Part)
    except msgspec.ValidationError as error:
        raise TideError(f"the server's answer is not a chat completion ({error})", where=where) from error
