"""The API's document: it describes every route, and exactly the fields and limits that the parsers read by."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import jsonschema_rs
import pytest
from scripted_engine import settings_with

from tided.api import anthropic_request, completions_request, prepare, responses_request, text_routes
from tided.api.app import build_app
from tided.api.openapi.document import SCHEMAS
from tided.api.routes import ROUTES
from tided.api.served import ServedModel
from tided.chat.families import DEEPSEEK_V41, FAMILIES
from tided.chat.fields import INT64_MAX, Fields
from tided.errors import RequestError

PREFIX = "#/components/schemas/"
FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"a": {}}}, "strict": False}
ALLOWED = {"mode": "auto", "tools": [{"function": {"name": "f"}}]}
NAMED = ({"name": "f"}, {"function": {"name": "f"}})
CHOICES = [
    *({"type": "function", **named} for named in NAMED),
    *({"type": "allowed_tools", "mode": "auto", "tools": [named]} for named in NAMED),
    *({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named]}} for named in NAMED),
]
SAMPLING = {
    "temperature": 0.5, "top_p": 0.5, "top_k": 5, "min_p": 0.1, "seed": 1, "presence_penalty": 1,
    "frequency_penalty": 1, "repetition_penalty": 1, "logit_bias": {"5": 1},
}  # fmt: skip
ANSWER = SAMPLING | {"stop": ["x"], "stop_token_ids": [3], "stream_options": {"include_usage": True}}
CHATS = [
    ANSWER
    | {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "no"}]},
            {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "c", "content": "x"},
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "response_format": {"type": "json_schema", "json_schema": {"strict": True, "schema": {"type": "object"}}},
        "tool_choice": {"type": "allowed_tools", "allowed_tools": ALLOWED},
        "reasoning_effort": "high",
        "reasoning": {"effort": 3, "enabled": True, "exclude": True},
        "thinking": {"type": "enabled"},
        "chat_template_kwargs": {"thinking": True},
        "logprobs": True,
        "top_logprobs": 3,
    },
    {
        "messages": [{"role": "user", "content": "a"}],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": {"type": "function", "name": "f"},
        "response_format": {"type": "json_schema", "strict": True, "schema": {"type": "object"}},
    },
    *(
        {
            "messages": [{"role": "user", "content": "a"}],
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": choice,
        }
        for choice in CHOICES
    ),
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x"}}]}]},
]  # fmt: skip
COMPLETIONS: list[dict[str, Any]] = [{"prompt": "a"}, {"prompt": [[1], "a"]}, ANSWER]
ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "a"}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "a"},
    {"role": "user", "content": [{"type": "refusal", "refusal": "a"}]},
    {"role": "user", "content": [{"type": "input_image", "image_url": "data:x"}]},
]
RESPONSES: list[dict[str, Any]] = [
    {
        "input": ITEMS[:4],
        "tools": [{"type": "function", **FUNCTION}],
        "tool_choice": {"type": "allowed_tools", "allowed_tools": ALLOWED},
        "text": {"format": {"type": "json_schema", "json_schema": {"strict": True, "schema": {"type": "object"}}}},
        "reasoning": {"effort": 3, "enabled": True, "exclude": True},
        "chat_template_kwargs": {"thinking": True},
    },
    {"input": ITEMS[4:5]},
    {"input": ITEMS[5:]},
    {
        "input": "a",
        "tools": [{"type": "function", **FUNCTION}],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "f"}]},
        "text": {"format": {"type": "json_schema", "strict": True, "schema": {"type": "object"}}},
    },
    *({"input": "a", "tools": [{"type": "function", **FUNCTION}], "tool_choice": choice} for choice in CHOICES),
]  # fmt: skip
SOURCES = [{"type": "base64", "media_type": "image/png", "data": "x"}, {"type": "url", "url": "https://x"}]
BLOCKS = [
    {"type": "text", "text": "a"},
    {"type": "document", "source": {"type": "text", "data": "a"}},
    {"type": "search_result", "content": [{"type": "text", "text": "a"}]},
]
MESSAGES: list[dict[str, Any]] = [
    {
        "system": BLOCKS,
        "messages": [
            {"role": "user", "content": [*BLOCKS, {"type": "tool_result", "tool_use_id": "c", "content": BLOCKS}]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "a"},
                                              {"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": {"properties": {"a": {}}}}],
        "tool_choice": {"type": "tool", "name": "f"},
        "thinking": {"type": "enabled", "budget_tokens": 5},
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {}}},
    },
    {"messages": [{"role": "user", "content": "a"}], "output_format": {"type": "json_schema", "schema": {}}},
    *({"messages": [{"role": "user", "content": [{"type": "image", "source": source}]}]} for source in SOURCES),
    *({"messages": [{"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "image", "source": source}]}]}]}
      for source in SOURCES),
]  # fmt: skip


class Watched(dict):
    """An object of a body that notes by which names it is asked."""

    def __init__(self, values: dict[str, Any], path: str, seen: set[str]) -> None:
        super().__init__((name, watched(value, f"{path}{name}", seen)) for name, value in values.items())
        self._path, self._seen = path, seen

    def get(self, name: str, default: Any = None) -> Any:
        self._seen.add(self._path + name)
        return super().get(name, default)

    def __getitem__(self, name: str) -> Any:
        self._seen.add(self._path + name)
        return super().__getitem__(name)


def watched(value: Any, path: str, seen: set[str]) -> Any:
    if isinstance(value, dict):
        return Watched(value, f"{path}." if path else "", seen)
    return [watched(entry, f"{path}[]", seen) for entry in value] if isinstance(value, list) else value


def leaves(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """(path, what is said of it) of every field below a schema; `[]` is an entry of an array."""
    if "$ref" in schema:
        schema = SCHEMAS[schema["$ref"].removeprefix(PREFIX)]
    for part in (*schema.get("anyOf", ()), *schema.get("allOf", ())):
        yield path, part
        yield from leaves(part, path)
    for name, value in schema.get("properties", {}).items():
        below = f"{path}.{name}" if path else name
        yield below, value
        yield from leaves(value, below)
    if schema.get("items"):
        yield f"{path}[]", schema["items"]
        yield from leaves(schema["items"], f"{path}[]")


@pytest.fixture(scope="module")
def served(tokenizer) -> ServedModel:
    return ServedModel.of(DEEPSEEK_V41, tokenizer, settings_with())


CLIENTS_OWN = re.compile(r"^logit_bias\.|(^|\.)(schema|(parameters|input_schema)\.(properties\.|(?!properties)))\.?\w")
"""Token ids, and what clients' own schemas say."""

HANDED_ON = {
    "input[].content[].image_url",
    "input[].output[].type",
    "input[].output[].text",
    "input[].output[].refusal",
    "input[].content[].image_url.url",
    "input[].output[].image_url",
    "input[].output[].image_url.url",
}
"""Parts go on to the parser of chats as they are, under another name."""
TOKENIZED = [{"prompt": "a", "add_special_tokens": True, "return_token_strs": True}, *CHATS]
OTHERWISE = {name: {("mcp_servers", ("array", 1000))} for name in ("MessageRequest", "CountRequest")}
OTHERWISE["DetokenizeRequest"] = {("tokens", ("array", 4096))}
"""Refused where there is any; and no more tokens than the context of this model holds."""
READERS = [
    ("ChatRequest", prepare, prepare.prepare, CHATS, set()),
    ("CompletionRequest", completions_request, completions_request.prepare_completion, COMPLETIONS, set()),
    ("ResponseRequest", responses_request, responses_request.prepare_response, RESPONSES, HANDED_ON),
    ("MessageRequest", anthropic_request, anthropic_request.prepare_message, MESSAGES, set()),
    ("CountRequest", anthropic_request, anthropic_request.count_tokens, MESSAGES, set()),
    ("TokenizeRequest", text_routes, text_routes.tokenize_asked, TOKENIZED, set()),
    ("DetokenizeRequest", text_routes, text_routes.detokenize_asked, [{"tokens": [1]}], set()),
]


def read(module: Any, parse: Any, bodies: list[Any], served: ServedModel, monkeypatch: Any) -> set[str]:
    """The names by which a parser asks these bodies."""
    seen: set[str] = set()
    for body in bodies:
        given = watched(body | ({"max_tokens": 5} if module is anthropic_request else {}), "", seen)
        monkeypatch.setattr(module, "parse_object", lambda _, given=given: given)
        with suppress(RequestError):
            parse(b"", served, lambda: None)
    return seen


@pytest.mark.parametrize(("name", "module", "parse", "bodies", "handed_on"), READERS, ids=[one[0] for one in READERS])
def test_the_fields_are_those_that_the_parser_reads(served, monkeypatch, name, module, parse, bodies, handed_on):
    """A field that is read and not told of fails here, and one that is told of and not read."""
    told = {path for path, _ in leaves(SCHEMAS[name]) if not path.endswith("[]") and path}
    found = {path for path in read(module, parse, bodies, served, monkeypatch) if not CLIENTS_OWN.search(path)}
    assert found - told == set()
    assert told - found == handed_on


def limits_of(schema: dict[str, Any]) -> tuple[Any, ...]:
    """What the parsers' own words for it would be."""
    sample = (*schema.get("enum", ()), *([schema["const"]] if "const" in schema else ()))
    kinds = schema.get("type") or ("string" if sample and isinstance(sample[0], str) else None)
    kind = next((one for one in kinds if one != "null"), None) if isinstance(kinds, list) else kinds
    if kind == "number":
        return (
            kind,
            schema.get("minimum", schema.get("exclusiveMinimum")),
            schema["maximum"],
            "exclusiveMinimum" in schema,
        )
    if kind == "integer":
        return kind, schema["minimum"], schema["maximum"]
    return (kind, schema.get("maxItems")) if kind == "array" else (kind,)


@pytest.mark.parametrize(
    ("name", "module", "parse", "bodies", "_"),
    [one for one in READERS if one[0] != "ResponseRequest"],
    ids=lambda one: str(one)[:20],
)
def test_types_and_limits_are_those_that_the_parser_checks(served, monkeypatch, name, module, parse, bodies, _):
    checked: set[tuple[str, tuple[Any, ...]]] = set()

    def noting(method: str, limits: Callable[..., tuple[Any, ...]]) -> None:
        plain = getattr(Fields, method)

        def noted(fields: Fields, field: str, *given: Any, **options: Any) -> Any:
            path = re.sub(r"\[\d+\]", "[]", fields.param(field))
            path = re.sub(r"^(stop_token_ids)\.\d+$", r"\1[]", path)
            if not CLIENTS_OWN.search(path):
                # The document does not know how many tokens the model has.
                named = (INT64_MAX if one == served.tokenizer.vocabulary_tokens - 1 else one for one in given)
                checked.add((path, limits(*named, **options)))
            return plain(fields, field, *given, **options)

        monkeypatch.setattr(Fields, method, noted)

    noting("boolean", lambda: ("boolean",))
    noting("string", lambda: ("string",))
    noting("integer", lambda low, high=INT64_MAX: ("integer", low, high))
    noting("number", lambda _, low, high, low_open=False, hint="": ("number", low, high, low_open))
    noting("array", lambda most: ("array", most))
    noting("fields", lambda: ("object",))
    read(module, parse, bodies, served, monkeypatch)
    told = {(path, limits_of(schema)) for path, schema in leaves(SCHEMAS[name])}
    assert checked - told == OTHERWISE.get(name, set())
    assert checked


def test_the_names_of_efforts_are_those_of_every_family():
    assert {frozenset(family.efforts) for family in FAMILIES.values()} == {frozenset(DEEPSEEK_V41.efforts)}


def test_every_route_is_in_the_document_and_no_other(engine, tokenizer):
    app = build_app(engine, tokenizer, DEEPSEEK_V41, settings_with())
    served = {
        (route.method, re.sub(r"^/v1/v1/", "/v1/", route.resource.canonical).rstrip("/") or "/")
        for route in app.router.routes()
        if route.method != "HEAD"
    }
    assert served == {(operation.method, operation.path) for operation, _ in ROUTES}


async def test_the_document_is_served(server):
    async with server.session.get("/openapi.json") as reply:
        assert reply.status == 200
        document = await reply.json()
    assert document["openapi"] == "3.1.0"
    assert {(method.upper(), path) for path, methods in document["paths"].items() for method in methods} == {
        (operation.method, operation.path) for operation, _ in ROUTES
    }
    for schema in document["components"]["schemas"].values():
        jsonschema_rs.meta.validate({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema})
    names = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document)))
    assert names == set(document["components"]["schemas"])


async def test_the_document_says_which_routes_need_a_key(serve, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("k\n")
    server = await serve(api_keys_file=str(keys))
    async with server.session.get("/openapi.json", headers={"x-api-key": "k"}) as reply:
        document = await reply.json()
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            async with server.session.request(method, path.replace("{id}", "x")) as reply:
                assert (reply.status == 401) == ("401" in operation["responses"]) == (operation.get("security") != [])
