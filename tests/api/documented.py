"""What the server's own document says of replies: every one that tests read is held to it."""

import json
from functools import cache
from typing import Any

import jsonschema_rs

from tided.api.openapi.document import EVENTS, JSON
from tided.api.routes import api_document

DOCUMENT = json.loads(api_document("1"))


def operation_of(method: str, path: str) -> dict[str, Any] | None:
    """None where the document has no such route."""
    plain = path.partition("?")[0].replace("/v1/v1/", "/v1/").rstrip("/")
    return DOCUMENT["paths"].get(plain, {}).get(method)


@cache
def _validator(method: str, path: str, status: int, media: str) -> jsonschema_rs.Draft202012Validator:
    operation = operation_of(method, path)
    assert operation is not None
    content = operation["responses"][str(status)]["content"][media]
    schema = content["x-event"] if media == EVENTS else content["schema"]
    return jsonschema_rs.Draft202012Validator(schema | {"components": DOCUMENT["components"]})


def check_reply(method: str, path: str, status: int, body: Any) -> None:
    if operation_of(method, path) is not None:
        _validator(method, path, status, JSON).validate(body)


_LAST = {
    "messages": ("message_stop", "error"),
    "responses": ("response.completed", "response.incomplete", "response.failed"),
}


def check_events(path: str, text: str) -> None:
    """A stream: its events' data by their schema, and the end that its API has."""
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    if path.endswith("/completions"):
        assert lines.pop() == "[DONE]"
    events = [json.loads(line) for line in lines]
    for event in events:
        _validator("post", path, 200, EVENTS).validate(event)
    assert events[-1].get("type") in _LAST.get(path.rstrip("/").rpartition("/")[2], (None,))
