"""What the API is, as OpenAPI 3.1 says it: made of the table of routes (`tided.api.routes`) and of their schemas."""

from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from tided.api.middleware import OPEN_PATHS
from tided.api.openapi import anthropic, chat, completions, replies, small
from tided.api.openapi.terms import Schema, either, ref, said, text

JSON, EVENTS = "application/json", "text/event-stream"

SCHEMAS: dict[str, Schema] = {
    **chat.SCHEMAS,
    **completions.SCHEMAS,
    **anthropic.SCHEMAS,
    **replies.SCHEMAS,
    **small.SCHEMAS,
}


class Query(msgspec.Struct, frozen=True):
    name: str
    about: str
    schema: Schema


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """`takes`, `gives`, `streams`: schemas by name, of the body, of the reply and of a stream's events. `media`: of a
    reply that is no JSON. `refusals`: statuses beside those that follow from the rest."""

    path: str
    about: str
    method: Literal["GET", "POST"] = "GET"
    takes: str = ""
    gives: str = ""
    streams: str = ""
    media: str = JSON
    query: tuple[Query, ...] = ()
    refusals: tuple[int, ...] = ()

    @property
    def refusal(self) -> Schema:
        """The shape of its refusals: that of the API whose route it is. The list of models serves two."""
        if self.path.startswith("/v1/messages"):
            return ref("AnthropicError")
        return either(ref("Error"), ref("AnthropicError")) if self.path.startswith("/v1/models") else ref("Error")


_MEANS = {
    304: "Nothing has changed.",
    400: "A field is missing, of the wrong type or out of range; or the prompt is too long.",
    401: "No valid key.",
    404: "There is no such thing.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    429: "The queue is full.",
    500: "The engine failed.",
    503: "Nothing is served: the model is being loaded, the server is ending, or the engine has stopped.",
}
_BODY = (400, 404, 408, 413, 429, 500, 503)  # 404: another model, where the profile wants the right name
_RETRY = {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer", "minimum": 1, "maximum": 60}}}


def document(operations: Iterable[Operation], version: str) -> dict[str, Any]:
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "TideLM", "version": version, "description": ABOUT},
        "paths": paths,
        "components": {
            "schemas": SCHEMAS,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{"bearer": []}, {"key": []}],
    }


ABOUT = (
    "OpenAI's API and Anthropic's over one engine. Unknown fields of a request are ignored; a known field of a wrong "
    "type or value is refused by name; null is as good as leaving a field out. A GET route answers HEAD too. A slash "
    "at the end and a second /v1 at the beginning make no difference. Where the server has no keys, none is needed. "
    "Every reply has an x-request-id. A body may be folded by gzip or deflate; its Content-Type does not matter."
)


def _operation(operation: Operation) -> dict[str, Any]:
    found: dict[str, Any] = {"summary": operation.about, "responses": _responses(operation)}
    parameters = [_parameter(name, "path", "", text(1), True) for name in _names(operation.path)]
    parameters += [_parameter(one.name, "query", one.about, one.schema, False) for one in operation.query]
    if parameters:
        found["parameters"] = parameters
    if operation.takes:
        found["requestBody"] = {"required": True, "content": {JSON: {"schema": ref(operation.takes)}}}
    if operation.path in OPEN_PATHS:
        found["security"] = []
    return found


def _names(path: str) -> list[str]:
    return [part[1:-1] for part in path.split("/") if part.startswith("{")]


def _parameter(name: str, place: str, about: str, schema: Schema, required: bool) -> dict[str, Any]:
    found = {"name": name, "in": place, "required": required, "schema": schema}
    return found | ({"description": about} if about else {})


def _responses(operation: Operation) -> dict[str, Any]:
    content: dict[str, Any] = {operation.media: {"schema": ref(operation.gives) if operation.gives else text()}}
    if operation.streams:
        # OpenAPI 3.1 has no word for the events of a stream: `x-event` is the schema of their data.
        content[EVENTS] = {"schema": said("Server-sent events.", text()), "x-event": ref(operation.streams)}
    found: dict[str, Any] = {"200": {"description": "The answer.", "content": content}}
    refused = set(operation.refusals) | (set(_BODY) if operation.takes else set())
    refused |= set() if operation.path in OPEN_PATHS else {401}
    for status in sorted(refused):
        found[str(status)] = _refusal(status, operation)
    return found


def _refusal(status: int, operation: Operation) -> dict[str, Any]:
    if status == 304:
        return {"description": _MEANS[status]}
    schema, health = operation.refusal, operation.path == "/health"
    content = {JSON: {"schema": ref("Health") if health else schema}}
    found: dict[str, Any] = {"description": _MEANS[status], "content": content}
    return found | ({"headers": _RETRY} if status in (429, 503) and not health else {})
