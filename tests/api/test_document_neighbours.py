"""The document and the parsers, one step from bodies that both take: what one refuses, the other refuses too.

Every place of every body is left out, set to null, and given values of other kinds: among them the constants that the
document knows for a field of that name, and, where an object stands in a list, every other object that the routes know.
Bodies that hold all that can stand beside each other show fields that are not looked at beside another."""

import json
import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import jsonschema_rs
import pytest
from scripted_engine import settings_with
from test_openapi import BLOCKS, CLIENTS_OWN, FUNCTION, ITEMS, READERS, SOURCES, leaves

from tided.api.openapi.document import SCHEMAS
from tided.api.served import ServedModel
from tided.chat.families import DEEPSEEK_V41
from tided.chat.messages import Segment
from tided.chat.tokenizer import Tokenizer
from tided.errors import RequestError
from tided.settings import Vision

NOTHING = object()
VALUES = (NOTHING, None, True, False, -5, 0, 1, 1.5, 10.0, "", "x", [], ["x"], [5], [{}], {}, {"x": 5})
TRUTHS = ("add_generation_prompt", "include_stop_str_in_output", "stream", "x_engine_stats", "ignore_eos")
FORMAT = {"type": "json_schema", "schema": {}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:x"}}
CALL = {"id": "c", "function": {"name": "f", "arguments": "{}"}}
THOUGHT = {"type": "thinking", "thinking": "a"}
USED = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": BLOCKS}
SEEN = {"type": "image", "source": SOURCES[0]}
USER = {"role": "user", "content": "a"}
SWITCHES = {
    "reasoning_effort": "high", "reasoning": {"effort": "low", "enabled": True, "exclude": True},
    "enable_thinking": True, "thinking": {"type": "enabled"}, "chat_template_kwargs":
    {"thinking": True, "enable_thinking": True, "reasoning_effort": 5, "clear_thinking": True},
}  # fmt: skip
FULL: dict[str, list[dict[str, Any]]] = {
    "ChatRequest": [
        SWITCHES | dict.fromkeys(TRUTHS, False) | {
            "messages": [
                {"role": "assistant", "content": "a", "reasoning_content": "a", "reasoning": "b", "thinking": "c",
                 "tool_calls": [CALL], "prefix": False},
                {"role": "tool", "content": [{"type": "text", "text": "a"}, IMAGE], "tool_call_id": "c"},
                {"role": "latest_reminder", "content": [{"type": "text", "text": "a"}]},
                {**USER, "content": [IMAGE], "prefix": False},
            ],
            "tools": [{"type": "function", "function": {**FUNCTION, "name": name}} for name in "fg"],
            "max_tokens": 5, "max_completion_tokens": 5, "min_tokens": 0, "n": 2, "logprobs": True, "top_logprobs": 2,
            "fidelity": "exact", "loop_break": 5, "cache_salt": "a", "model": "a", "parallel_tool_calls": False,
            "continue_final_message": False, "separate_reasoning": False, "include_reasoning": False,
            "response_format": {**FORMAT, "json_schema": FORMAT}, "modalities": ["text"],
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
    ],
    "CompletionRequest": [
        {"prompt": prompt, "add_bos": False, "parse_special": False, "echo": True, "best_of": 1, "suffix": "",
         "max_tokens": 5, "max_completion_tokens": 5, "logprobs": 1, "prompt_logprobs": 2, "adapt": True, "stop": "x"}
        for prompt in ("a", [1], ["a"], [[1], [2]])
    ],
    "ResponseRequest": [
        SWITCHES | {
            "input": [*ITEMS[:4], {**ITEMS[4], "role": "assistant"}, ITEMS[5], {"role": "system", "content": "a"}],
            "tools": [{"type": "function", **FUNCTION, "name": name} for name in "fg"],
            "instructions": "a", "max_output_tokens": 5, "background": False, "parallel_tool_calls": True,
            "text": {"format": {**FORMAT, "json_schema": FORMAT}}, "tool_choice": "auto", "stream": False,
        }
    ],
    "MessageRequest": [
        {
            "system": [*BLOCKS, {"type": "other"}],
            "messages": [
                {"role": "user", "content": [*BLOCKS, SEEN, RESULT | {"content": [*BLOCKS, SEEN]}]},
                {"role": "system", "content": [{"type": "text", "text": "a"}]},
                {"role": "assistant", "content": [*BLOCKS, THOUGHT, USED]},
                USER,
            ],
            "tools": [{"type": "custom", "name": name, "input_schema": {}, "strict": False, "defer_loading": False}
                      for name in "fg"] + [{"type": "web_search_1", "name": "s"}],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": False}, "mcp_servers": [],
            "output_config": {"format": FORMAT}, "output_format": FORMAT, "stop_sequences": ["x"], "stream": False,
            "model": "a", "fidelity": "fast", "loop_break": 5, "cache_salt": "a", "thinking": {"type": "adaptive"},
        }
    ],
}  # fmt: skip
FULL |= {"CountRequest": FULL["MessageRequest"]}
PIECES = (*BLOCKS, *ITEMS, THOUGHT, USED, RESULT, SEEN, IMAGE, USER, CALL, {"type": "refusal", "refusal": "a"})

BEYOND_WORDS = re.compile(
    "^tool_choice: there is no tool |^tool_choice: required, but there are no tools"
    "|^tool_choice.type: any, but there are no tools|^tool_choice.name: expected the name of one of the tools that"
    "|^tools: only tools of type function are supported|^tools: the name .* is used twice"
    "|^top_logprobs: needs logprobs|^best_of: is only supported where it equals n|^max_tokens: 0 says nothing"
    "|^adapt: false is for prompts that are scored"
    "|: a text that was begun cannot be held to a format|^(ignore_eos|min_tokens): contradicts a grammar"
    "|^add_generation_prompt: |: only an assistant message without tool calls can be continued"
)
"""Refusals that no schema says: names that must be among others, fields that contradict each other."""


@cache
def constants() -> dict[str, list[Any]]:
    """By a field's name: every value that the document names for it, anywhere."""
    found: dict[str, list[Any]] = {}

    def look(schema: Any, name: str) -> None:
        if isinstance(schema, list):
            for part in schema:
                look(part, name)
        elif isinstance(schema, dict):
            found.setdefault(name, []).extend(
                [*schema.get("enum", ()), *(schema[w] for w in ("const",) if w in schema)]
            )
            for own, inner in schema.get("properties", {}).items():
                look(inner, own)
            for word in schema.keys() - {"properties"}:
                look(schema[word], name)

    look(list(SCHEMAS.values()), "")
    return found


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    below = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in below:
        yield (*at, name), inner
        yield from places(inner, (*at, name))


def spelled(at: tuple[Any, ...]) -> str:
    return "".join("[]" if isinstance(name, int) else f".{name}" for name in at).lstrip(".")


def put(body: Any, at: tuple[Any, ...], value: Any) -> Any:
    """A copy of the body that has this value at this place."""
    name, *rest = at
    changed = dict(body) if isinstance(body, dict) else list(body)
    if rest:
        changed[name] = put(body[name], tuple(rest), value)
    elif value is not NOTHING:
        changed[name] = value
    elif isinstance(name, int) or name in changed:
        del changed[name]
    return changed


@cache
def known(name: str) -> dict[str, list[str]]:
    """By the place of an object in bodies of this schema: the names of all fields that it may have."""
    found: dict[str, list[str]] = {}
    for path in dict.fromkeys(path for path, _ in leaves(SCHEMAS[name]) if path and not path.endswith("[]")):
        found.setdefault(path.rpartition(".")[0], []).append(path.rpartition(".")[2])
    return found


def filled(name: str, value: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The body's places, and those that the document knows and it has nothing at."""
    yield from places(value)
    for where, inner in [((), value), *places(value)]:
        for missing in (set(known(name).get(spelled(where), ())) - inner.keys()) if isinstance(inner, dict) else ():
            yield (*where, missing), None


def neighbours(name: str, body: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "as it is", body
    for at, given in filled(name, body):
        if CLIENTS_OWN.search(spelled(at)):
            continue
        own = next(name for name in reversed(at) if isinstance(name, str))
        pieces = PIECES if isinstance(given, dict) and isinstance(at[-1], int) else ()
        for value in (*VALUES, *constants().get(own, ()), *pieces):
            told = "nothing" if value is NOTHING else json.dumps(value)
            yield f"{spelled(at)} = {told}", put(body, at, value)


@pytest.fixture(scope="module")
def served(tokenizer) -> ServedModel:
    return ServedModel.of(DEEPSEEK_V41, tokenizer, settings_with(vision=Vision(rank=0)))


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token a text: what a prompt is spelled in decides nothing here, and took four fifths of the time."""

    def parts(own: Tokenizer, segments: Iterable[Segment]) -> Iterator[list[int]]:
        return ([own.special_id(one.text) if one.special else 5] for one in segments if one.text)

    monkeypatch.setattr(Tokenizer, "encode_in_parts", parts)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(("name", "module", "parse", "bodies", "_"), READERS, ids=[one[0] for one in READERS])
def test_both_refuse_the_same(served, monkeypatch, name, module, parse, bodies, _):
    schema = jsonschema_rs.Draft202012Validator(SCHEMAS[name] | {"components": {"schemas": SCHEMAS}})
    wrong: list[str] = []
    taken = 0
    for at, given in enumerate([*bodies, *FULL.get(name, ())]):
        body = given | ({"max_tokens": 5} if name in ("MessageRequest", "CountRequest") else {})
        assert schema.is_valid(body)
        for told, changed in neighbours(name, body):
            monkeypatch.setattr(module, "parse_object", lambda _, changed=changed: changed)
            refusal = None
            try:
                parse(b"", served, lambda: None)
                taken += 1
            except RequestError as error:
                refusal = str(error)
            allowed = schema.is_valid(changed)
            if allowed and refusal and not BEYOND_WORDS.search(refusal):
                wrong.append(f"{at}: {told}: refused: {refusal}")
            if not allowed and not refusal:
                wrong.append(f"{at}: {told}: taken, against the document")
    assert not wrong, "\n".join(dict.fromkeys(wrong))
    assert taken > 5
