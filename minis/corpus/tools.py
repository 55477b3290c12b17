"""Domain tools: calls whose arguments must be copied from the question, results, and questions that need no tool."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from minis.corpus import facts
from minis.corpus.chat import assistant, effort, system, user, wrap
from minis.corpus.words import Words
from minis.dialogue import Dialogue, Message

Args = dict[str, Any]


@dataclass
class Param:
    name: str
    kind: str  # JSON schema type
    source: str  # how a value is drawn
    text: str
    required: bool = True


@dataclass
class Kind:
    names: list[str]
    text: str
    params: list[Param]
    ask: list[str]
    results: list[tuple[str, str]]  # (result JSON, answer), both with slots


def _p(name: str, source: str, text: str, kind: str = "string") -> Param:
    return Param(name, kind, source, text)


KINDS = [
    Kind(
        ["get_weather", "weather", "current_weather"],
        "Get the weather of a place",
        [_p("city", "place", "The city name")],
        [
            "What is the weather in {city}?",
            "How is the weather in {city} today?",
            "Is it warm in {city}?",
            "Tell me the weather for {city}.",
        ],
        [('{{"temperature": {n}, "sky": "{v}"}}', "It is {v} in {city} with {n} degrees.")],
    ),
    Kind(
        ["read_file", "open_file", "cat_file"],
        "Read a text file",
        [_p("path", "file", "Path of the file")],
        [
            "Read {path}.",
            "Show me the file {path}.",
            "What is in {path}?",
            "Open {path} please.",
            "Print the contents of {path}.",
        ],
        [("{t}", "The file {path} says: {t}")],
    ),
    Kind(
        ["write_file", "save_file"],
        "Write text to a file",
        [_p("path", "file", "Path of the file"), _p("content", "value", "Text to write")],
        ["Write {content} to {path}.", "Save the text {content} in {path}.", "Put {content} into the file {path}."],
        [
            ('{{"ok": true}}', "I wrote {content} to {path}."),
            ('{{"error": "disk full"}}', "I could not write {path}: disk full."),
        ],
    ),
    Kind(
        ["search", "web_search", "find_pages"],
        "Search the web",
        [_p("query", "phrase", "What to search for")],
        ["Search for {query}.", "Look up {query} on the web.", "Find pages about {query}.", "Search the web: {query}"],
        [('{{"hits": {n}}}', "I found {n} pages about {query}.")],
    ),
    Kind(
        ["lookup_stock", "stock_price"],
        "Look up a share price",
        [_p("symbol", "symbol", "Ticker symbol"), _p("days", "small", "Number of days", "integer")],
        [
            "Look up the share price of {symbol} for {days} days.",
            "What did {symbol} cost in the last {days} days?",
            "Show the stock {symbol} over {days} days.",
        ],
        [('{{"price": {n}}}', "The price of {symbol} is {n}.")],
    ),
    Kind(
        ["send_mail", "send_message"],
        "Send a message to a person",
        [_p("to", "name", "Receiver"), _p("text", "value", "Message text")],
        ["Send {to} the message {text}.", "Tell {to}: {text}", "Write to {to} that {text}."],
        [('{{"sent": true}}', "I sent the message to {to}.")],
    ),
    Kind(
        ["set_timer", "start_timer"],
        "Start a timer",
        [_p("minutes", "small", "Length in minutes", "integer")],
        ["Set a timer for {minutes} minutes.", "Wake me in {minutes} minutes.", "Start a timer of {minutes} minutes."],
        [('{{"ok": true}}', "The timer runs for {minutes} minutes.")],
    ),
    Kind(
        ["set_light", "switch_light"],
        "Turn a light on or off",
        [_p("room", "word", "The room"), _p("on", "bool", "New state", "boolean")],
        [
            "Turn {onoff} the light in the {room}.",
            "Switch the {room} light {onoff}.",
            "Light {onoff} in the {room}, please.",
        ],
        [('{{"ok": true}}', "The light in the {room} is {onoff} now.")],
    ),
    Kind(
        ["add_note", "create_note"],
        "Store a note",
        [_p("text", "value", "Text of the note")],
        ["Note down {text}.", "Make a note: {text}", "Remember {text} in my notes."],
        [('{{"id": {n}}}', "I stored the note with number {n}.")],
    ),
    Kind(
        ["get_time", "current_time"],
        "Get the time at a place",
        [_p("place", "place", "City or country")],
        ["What time is it in {place}?", "Tell me the time in {place}.", "How late is it in {place}?"],
        [('{{"time": "{h}:{m}"}}', "It is {h}:{m} in {place}.")],
    ),
    Kind(
        ["run_shell", "run_command"],
        "Run a shell command",
        [_p("command", "command", "The command")],
        ["Run {command}.", "Execute the command {command}", "Please run `{command}` in the shell."],
        [("{t}", "The command printed: {t}"), ("", "The command printed nothing.")],
    ),
    Kind(
        ["calculate", "add_numbers"],
        "Add two numbers",
        [_p("a", "number", "First number", "integer"), _p("b", "number", "Second number", "integer")],
        ["Add {a} and {b} with the tool.", "Use the calculator: {a} + {b}", "What does the tool say for {a} plus {b}?"],
        [("{sum}", "The sum of {a} and {b} is {sum}.")],
    ),
    Kind(
        ["get_order", "order_status"],
        "Look up an order",
        [_p("order_id", "code", "Number of the order")],
        ["Where is my order {order_id}?", "What is the status of order {order_id}?", "Check order {order_id}."],
        [('{{"status": "{v}"}}', "The status of order {order_id} is {v}.")],
    ),
    Kind(
        ["list_ports", "list_files", "list_users"],
        "List what is known",
        [],
        ["List them.", "Show the list.", "What is on the list?", "Give me the whole list."],
        [('["{v}", "{x}"]', "The list has {v} and {x}.")],
    ),
]
_VERBS = ["get", "set", "find", "make", "update", "delete", "check", "start", "stop", "show", "count", "move", "copy"]


def _draw(source: str, w: Words) -> Any:
    r = w.rng
    if source == "small":
        return r.randint(1, 99)
    if source == "number":
        return w.number()
    if source == "bool":
        return r.random() < 0.5
    if source == "symbol":
        return "".join(r.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(r.randint(2, 5)))
    if source == "command":
        return r.choice(["ls {f}", "cat {f}", "rm {f}", "echo {x}", "grep {x} {f}", "python {f}", "wc -l {f}"]).format(
            f=w.file(), x=w.word()
        )
    return {
        "place": w.place,
        "file": w.file,
        "phrase": w.phrase,
        "value": w.value,
        "name": w.name,
        "word": w.word,
        "code": w.code,
    }[source]()


def _random_kind(w: Words) -> Kind:
    """A tool nobody has seen: verb_noun with one or two open parameters."""
    r = w.rng
    noun, verb = w.word(), r.choice(_VERBS)
    params = []
    for _ in range(r.randint(1, 2)):
        name = w.word()
        source = r.choice(["value", "file", "code", "name", "number"])
        if name not in [p.name for p in params] and name not in ("n", "v", "x", "t", "h", "m"):
            params.append(_p(name, source, f"The {name}", "integer" if source == "number" else "string"))
    ask = " and ".join(f"{p.name} {{{p.name}}}" for p in params)
    return Kind(
        [f"{verb}_{noun}"],
        f"{verb.title()} the {noun}",
        params,
        [f"{verb.title()} the {noun} with {ask}.", f"Please {verb} {noun}: {ask}"],
        [('{{"result": "{v}"}}', "The result is {v}."), ('{{"ok": true}}', "Done.")],
    )


def schema(name: str, kind: Kind) -> dict[str, Any]:
    props = {p.name: {"type": p.kind, "description": p.text} for p in kind.params}
    parameters: dict[str, Any] = {"type": "object", "properties": props}
    if props:
        parameters["required"] = [p.name for p in kind.params]
    return {"type": "function", "function": {"name": name, "description": kind.text, "parameters": parameters}}


def call(name: str, args: Args) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": json.dumps(args, ensure_ascii=False)}}


def _reason(r: random.Random, name: str, args: Args) -> str:
    shown = " and ".join(f"{k} {json.dumps(v) if not isinstance(v, str) else v}" for k, v in args.items())
    return r.choice([f"I need {name} for this", f"The tool {name} fits"]) + (f", with {shown}." if shown else ".")


def _use(w: Words, name: str, kind: Kind, thinking: bool, offered: bool) -> list[Message]:
    """One question with its call, and in half of the cases the result and the answer."""
    r = w.rng
    args: Args = {p.name: _draw(p.source, w) for p in kind.params}
    slots = {**args, "onoff": "on" if args.get("on") else "off"}
    question = r.choice(kind.ask).format(**slots)
    question = wrap(r, question) if not any(p.source in ("value", "command") for p in kind.params) else question
    if not offered:
        return [user(question), assistant("I have no tool for that.", "None of the tools fits." if thinking else None)]
    out = [user(question), assistant("", _reason(r, name, args) if thinking else None, [call(name, args)])]
    if r.random() < 0.5:
        n = r.randint(-9, 99)
        extra = {
            "n": n,
            "v": w.word(),
            "x": w.word(),
            "t": w.phrase(2, 6),
            "h": r.randint(0, 23),
            "m": r.randint(10, 59),
            "sum": sum(v for v in args.values() if isinstance(v, int)),
        }
        result, answer = r.choice(kind.results)
        result, answer = (s.format(**{**extra, **slots}) for s in (result, answer))
        out += [{"role": "tool", "content": result}, assistant(answer, "The tool answered." if thinking else None)]
    return out


def generate(r: random.Random, w: Words) -> Dialogue:
    kinds = [_random_kind(w) if r.random() < 0.3 else r.choice(KINDS) for _ in range(r.choice([1, 2, 2, 3]))]
    named = {r.choice(k.names): k for k in kinds}
    thinking = r.random() < 0.35
    tools = [schema(n, k) for n, k in named.items()]
    messages = system(r, 0.4)
    for _ in range(r.choice([1, 1, 2])):
        x = r.random()
        if x < 0.82:
            name = r.choice(list(named))
            messages += _use(w, name, named[name], thinking, True)
            if messages[-1].get("tool_calls"):
                break  # without a result nothing can follow
        elif x < 0.9:
            other = r.choice([k for k in KINDS if k not in kinds])
            messages += _use(w, other.names[0], other, thinking, False)
        else:
            q, a = facts._country(r) if r.random() < 0.5 else facts._simple(r)
            messages += [user(wrap(r, q)), assistant(a, "I know this without a tool." if thinking else None)]
    return Dialogue(messages, tools, thinking, effort(r))
