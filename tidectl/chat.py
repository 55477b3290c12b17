"""`tidectl chat`: one answer, or a conversation on a terminal."""

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tidectl import http
from tidectl.answers import Answer, Pace, Screen, Shows, receive, tell_cost
from tidectl.attach import image_part
from tidectl.http import RequestFailed
from tidectl.output import emit, is_terminal, report, say
from tidectl.patience import waiting_is_told
from tidectl.running import server_url
from tided.errors import TideError, UnavailableError, UsageError

Message = dict[str, Any]


class Options(NamedTuple):
    """What to ask for; None leaves it to the server."""

    system: str = ""
    max_tokens: int | None = None
    temperature: float | None = None
    thinking: bool | None = None
    stream: bool = True
    model: str = ""
    fidelity: str = ""
    images: tuple[Path, ...] = ()
    markdown: bool = True


HELP = """/image FILE   goes with the next question; again for more
/thoughts     what it thought before its last answer
/new          a new conversation
/help         this
/quit         or Ctrl-D: the end"""


class Server(NamedTuple):
    url: str
    key: str


def run(prompt: str | None, url: str | None, options: Options, as_json: bool) -> None:
    """One question, from the argument or from standard input; without either a conversation on the terminal."""
    server = Server(server_url(url), os.environ.get("TIDE_API_KEY", ""))
    if prompt is None and sys.stdin.isatty() and not as_json:
        return converse(server, options)
    question = _standard_input() if prompt is None else prompt
    if not question.strip():
        raise UsageError("no question", hint='tidectl chat "How many legs does a spider have?"')
    return ask(server, question, options, as_json)


def ask(server: Server, prompt: str, options: Options, as_json: bool) -> None:
    """One question, its answer on stdout and its statistics on stderr."""
    images = [image_part(file) for file in options.images]
    pace = Pace()
    answer = _fetch(server, [*_opening(options), _user(prompt, images)], options, _screen(options, as_json), pace)
    if as_json:
        emit("chat/1", {**answer._asdict(), "url": server.url})
    else:
        tell_cost(answer, pace)


@dataclass
class Conversation:
    """`images` wait for the next question; `thoughts` are those before the newest answer."""

    messages: list[Message]
    images: list[dict[str, Any]] = field(default_factory=list)
    thoughts: str = ""

    def command(self, line: str, options: Options) -> bool:
        """Does what a line like `/image cat.png` says; whether it was one. Raises UsageError."""
        found = re.fullmatch(r"/([a-z]+)(?:\s+(.*\S))?\s*", line.strip())
        name, rest = (found[1], found[2]) if found else ("", None)
        if name == "image" and rest:
            self.images.append(image_part(Path(rest)))
            say(f"{len(self.images)} with the next question", "dim")
        elif name == "new":
            self.messages, self.images, self.thoughts = _opening(options), [], ""
            say("a new conversation", "dim")
        elif name == "thoughts":
            say(self.thoughts or "it has not thought", "dim")
        elif name and (rest is None or name in ("help", "quit")):
            if name != "help":
                say(f"there is no /{name}", "bold")
            say(HELP, "dim")
        else:
            return False
        return True


def converse(server: Server, options: Options) -> None:
    """Questions from the terminal until its end of input. Ctrl-C stops an answer, at the prompt it leaves."""
    say(f"{server.url}: end with Ctrl-D; Ctrl-C stops an answer; /help tells more", "dim")
    talk = Conversation(_opening(options), [image_part(file) for file in options.images])
    while (prompt := _question()) is not None and prompt.strip() != "/quit":
        try:
            if prompt.strip() and not talk.command(prompt, options):
                _answer_in(talk, server, prompt, options)
        except KeyboardInterrupt:
            say("(stopped; this question and its answer are left out of the conversation)", "dim")
        except (RequestFailed, UnavailableError, UsageError) as error:
            report(error)


def _answer_in(talk: Conversation, server: Server, prompt: str, options: Options) -> None:
    question, pace = _user(prompt, talk.images), Pace()
    answer = _fetch(server, [*talk.messages, question], options, _screen(options, False), pace)
    tell_cost(answer, pace)
    talk.messages += [question, {"role": "assistant", "content": answer.content}]
    talk.images, talk.thoughts = [], answer.reasoning


def _screen(options: Options, quiet: bool) -> Shows:
    """Markdown is drawn on a terminal; elsewhere an answer is what the model wrote."""
    if quiet or not options.markdown or not options.stream or not is_terminal(sys.stdout):
        return Screen(quiet)
    from tidectl.live.markdown import MarkdownScreen

    return MarkdownScreen()


def _standard_input() -> str:
    """By bytes: what a locale would make of them is not what was written."""
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"the question on standard input is no UTF-8 text ({error})") from error


def _opening(options: Options) -> list[Message]:
    return [{"role": "system", "content": options.system}] if options.system else []


def _user(prompt: str, images: list[dict[str, Any]] | None = None) -> Message:
    return {"role": "user", "content": [*images, {"type": "text", "text": prompt}] if images else prompt}


def _question() -> str | None:
    with suppress(ImportError):
        import readline  # noqa: F401  input() then edits lines and remembers them
    try:
        return input("> ")
    except EOFError:
        say("")
        return None


def _body(messages: list[Message], options: Options) -> dict[str, Any]:
    body: dict[str, Any] = {"messages": messages, "stream": options.stream}
    if options.stream:
        body["stream_options"] = {"include_usage": True}
    if options.max_tokens is not None:
        body["max_tokens"] = options.max_tokens
    if options.temperature is not None:
        body["temperature"] = options.temperature
    body |= {name: value for name in ("model", "fidelity") if (value := getattr(options, name))}
    if options.thinking is not None:
        body["thinking"] = {"type": "enabled" if options.thinking else "disabled"}
    return body


def _fetch(server: Server, messages: list[Message], options: Options, screen: Shows, pace: Pace) -> Answer:
    body = _body(messages, options)
    if options.stream and not isinstance(screen, Screen) and _is_ours(server):
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    try:
        if not options.stream:
            return receive([http.answer(*server, body)], screen, server.url)
        with closing(http.stream(*server, body)) as parts, waiting_is_told(server.url) as began:
            return receive(_noted(parts, began), screen, server.url, pace)
    except RequestFailed as error:
        raise _of_another_kind(error, server, options) from error


def _is_ours(server: Server) -> bool:
    """What only TideLM is known to take is asked of it alone."""
    try:
        return http.health(server.url).get("engine") == "tidelm"
    except TideError:
        return False


def _of_another_kind(error: RequestFailed, server: Server, options: Options) -> RequestFailed:
    """Many servers want a model's name, which ours does not: the hint says which there are."""
    if options.model or _is_ours(server) or not (names := http.models(*server)):
        return error
    hint = f"this is no TideLM; name its model: --model {names[0]}"
    others = f" (also: {', '.join(names[1:6])})" if names[1:] else ""
    return RequestFailed(error.what, where=error.where, hint=hint + others)


def _noted(parts: Iterable[Any], began: Callable[[], None]) -> Iterator[Any]:
    for part in parts:
        began()
        yield part
