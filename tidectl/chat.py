"""`tidectl chat`: one answer, or a conversation on a terminal."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from typing import Any, NamedTuple

from tidectl import http
from tidectl.answers import Answer, Screen, receive, tell_cost
from tidectl.http import RequestFailed
from tidectl.output import emit, report, say
from tidectl.patience import waiting_is_told
from tidectl.running import server_url
from tided.errors import UnavailableError, UsageError

Message = dict[str, Any]


class Options(NamedTuple):
    """What to ask for; None leaves it to the server."""

    system: str = ""
    max_tokens: int | None = None
    temperature: float | None = None
    thinking: bool | None = None
    stream: bool = True


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
    answer = _fetch(server, [*_opening(options), _user(prompt)], options, quiet=as_json)
    if as_json:
        emit("chat/1", {**answer._asdict(), "url": server.url})
    else:
        tell_cost(answer)


def converse(server: Server, options: Options) -> None:
    """Questions from the terminal until its end of input. Ctrl-C stops an answer, at the prompt it leaves."""
    say(f"{server.url}: end with Ctrl-D; Ctrl-C stops an answer", "dim")
    messages = _opening(options)
    while (prompt := _question()) is not None:
        if not prompt.strip():
            continue
        try:
            answer = _fetch(server, [*messages, _user(prompt)], options, quiet=False)
        except KeyboardInterrupt:
            say("(stopped; this question and its answer are left out of the conversation)", "dim")
            continue
        except (RequestFailed, UnavailableError) as error:
            report(error)
            continue
        tell_cost(answer)
        messages += [_user(prompt), {"role": "assistant", "content": answer.content}]


def _standard_input() -> str:
    """By bytes: what a locale would make of them is not what was written."""
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"the question on standard input is no UTF-8 text ({error})") from error


def _opening(options: Options) -> list[Message]:
    return [{"role": "system", "content": options.system}] if options.system else []


def _user(prompt: str) -> Message:
    return {"role": "user", "content": prompt}


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
    if options.thinking is not None:
        body["thinking"] = {"type": "enabled" if options.thinking else "disabled"}
    return body


def _fetch(server: Server, messages: list[Message], options: Options, quiet: bool) -> Answer:
    body, screen = _body(messages, options), Screen(quiet)
    if not options.stream:
        return receive([http.answer(*server, body)], screen, server.url)
    with closing(http.stream(*server, body)) as parts, waiting_is_told(server.url) as began:
        return receive(_noted(parts, began), screen, server.url)


def _noted(parts: Iterable[Any], began: Callable[[], None]) -> Iterator[Any]:
    for part in parts:
        began()
        yield part
