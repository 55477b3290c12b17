"""`tidectl chat`: one answer, or a conversation on a terminal."""

import os
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any, NamedTuple

from tidectl import http
from tidectl.http import RequestFailed
from tidectl.output import dim, emit, is_terminal, report, say, visible
from tidectl.running import running_url
from tided.errors import UnavailableError, UsageError

DEFAULT_URL = "http://127.0.0.1:8000"

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


class Answer(NamedTuple):
    content: str
    reasoning: str
    tool_calls: list[Any]
    finish_reason: str | None
    usage: dict[str, Any]
    stats: dict[str, Any]


def run(prompt: str | None, url: str | None, options: Options, as_json: bool) -> None:
    """One question, from the argument or from standard input; without either a conversation on the terminal."""
    server = Server(http.base_url(url or running_url() or DEFAULT_URL), os.environ.get("TIDE_API_KEY", ""))
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
        _finish(answer)


def converse(server: Server, options: Options) -> None:
    """Questions from the terminal until its end of input. Ctrl-C stops an answer, at the prompt it leaves."""
    say(dim(f"{server.url}: end with Ctrl-D; Ctrl-C stops an answer"))
    messages = _opening(options)
    while (prompt := _question()) is not None:
        if not prompt.strip():
            continue
        try:
            answer = _fetch(server, [*messages, _user(prompt)], options, quiet=False)
        except KeyboardInterrupt:
            say(dim("\n(stopped; this question and its answer are left out of the conversation)"))
            continue
        except (RequestFailed, UnavailableError) as error:
            report(error)
            continue
        _finish(answer)
        messages += [_user(prompt), {"role": "assistant", "content": answer.content}]


def _standard_input() -> str:
    """By bytes: what a locale would make of them is not what was written."""
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"the question on standard input is no UTF-8 text ({error})") from error


def statistics_line(answer: Answer) -> str:
    """What an answer cost, in one line; a figure that the server did not give is left out."""
    stats, experts = answer.stats, answer.stats.get("experts") or {}
    share = stats.get("substituted_weight_share")
    parts = [
        _figure(answer.usage.get("prompt_tokens"), "{} prompt tokens"),
        _figure(answer.usage.get("completion_tokens"), "{} tokens"),
        _figure(stats.get("ttft_s"), "first after {:.2f} s"),
        _figure(stats.get("decode_tok_s"), "{:.1f} tok/s"),
        _figure(experts.get("resident"), f"{{}} of {experts.get('total', '?')} experts resident"),
        _figure(None if share is None else 100 * share, "{:.1f} % of the routing weight substituted"),
    ]
    return ", ".join(part for part in parts if part)


def _figure(value: object, form: str) -> str:
    return form.format(value) if isinstance(value, int | float) and not isinstance(value, bool) else ""


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
    body = _body(messages, options)
    if options.stream:
        with closing(http.stream(*server, body)) as chunks:
            return _collect(chunks, quiet)
    reply = http.answer(*server, body)
    choice = (reply["choices"] or [{}])[0]
    message = choice.get("message") or {}
    answer = Answer(
        message.get("content") or "",
        message.get("reasoning_content") or "",
        message.get("tool_calls") or [],
        choice.get("finish_reason"),
        reply.get("usage") or {},
        reply.get("x_engine_stats") or {},
    )
    if not quiet:
        _show_reasoning(answer.reasoning)
        _show(answer.content)
    return answer


def _collect(chunks: Iterator[dict[str, Any]], quiet: bool) -> Answer:
    content, reasoning, calls = "", "", list[Any]()
    finish_reason, usage, stats = None, dict[str, Any](), dict[str, Any]()
    for chunk in chunks:
        usage = chunk.get("usage") or usage
        stats = chunk.get("x_engine_stats") or stats
        for choice in chunk.get("choices") or []:
            delta = choice.get("delta") or {}
            finish_reason = choice.get("finish_reason") or finish_reason
            thought, text = delta.get("reasoning_content") or "", delta.get("content") or ""
            calls += delta.get("tool_calls") or []
            if not quiet:
                if text and reasoning and not content:
                    say("")  # ends the line of the reasoning
                _show_reasoning(thought)
                _show(text)
            reasoning, content = reasoning + thought, content + text
    return Answer(content, reasoning, calls, finish_reason, usage, stats)


def _show(text: str) -> None:
    print(visible(text) if is_terminal(sys.stdout) else text, end="", flush=True)


def _show_reasoning(text: str) -> None:
    if text:
        print(dim(visible(text)), end="", file=sys.stderr, flush=True)


def _finish(answer: Answer) -> None:
    if answer.content and not answer.content.endswith("\n"):
        print(flush=True)
    for call in answer.tool_calls:
        say(dim(f"tool call: {visible(str(call.get('function') or call))}"))
    if answer.finish_reason == "length":
        say(dim("(cut: max_tokens or the context was reached)"))
    say(dim(statistics_line(answer)))
