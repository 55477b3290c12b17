"""Around every request: its id, the key check, faults in the API's shape, one line of log without text."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from aiohttp import HttpVersion11, hdrs, web

from tided.api.context import CONTEXT, NOTE, Note
from tided.api.door import Connection
from tided.api.errors import anthropic_error_body, as_request_error, error_body, error_response
from tided.api.generation import Generation
from tided.api.ids import request_id
from tided.api.metrics import METRICS
from tided.errors import RequestError

log = logging.getLogger("tided.api")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

OPEN_PATHS = ("/", "/health", "/api/hello", "/expert-map")
_CLIENT_GONE = 499


@web.middleware
async def observe(request: web.Request, handler: Handler) -> web.StreamResponse:
    request[NOTE] = note = Note(request_id(request.headers.get("x-request-id")))
    started_s, status = time.monotonic(), _CLIENT_GONE
    if connection := Connection.of(request):
        connection.begun(request)
    try:
        response = await _answer(request, handler)
        status = response.status
        return response
    except asyncio.CancelledError:
        note.outcome = "client gone"
        raise
    finally:
        if connection:
            connection.over()
        _log(request, note, status, time.monotonic() - started_s)


async def _answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    context = request.app[CONTEXT]
    try:
        if request.method == hdrs.METH_OPTIONS:
            return _preflight(request)
        if not _is_open(request):
            request[NOTE].key = context.keys.check(request.headers)
        return await handler(request)
    except Exception as error:
        shown = as_request_error(error)
        anthropic = is_anthropic(request)
        body = anthropic_error_body(shown, request[NOTE].request_id) if anthropic else error_body(shown)
        response = error_response(shown, context.retry_after_s(), body)
        if isinstance(error, web.HTTPMethodNotAllowed):
            response.headers["Allow"] = error.headers["Allow"]
        if not request.content.is_eof():
            response.force_close()  # what is still on its way belongs to nobody
        return response


def _is_open(request: web.Request) -> bool:
    path = request.path.rstrip("/") or "/"
    readable = path in OPEN_PATHS or (path == "/metrics" and request.app[CONTEXT].served.settings.server.metrics_open)
    return readable and request.method in (hdrs.METH_GET, hdrs.METH_HEAD)


def is_anthropic(request: web.Request) -> bool:
    """Whether a refusal is to have Anthropic's shape: by the path, known or not; the list of models serves two APIs."""
    parts = request.path.strip("/").split("/")
    while parts[:1] == ["v1"]:
        parts = parts[1:]
    return parts[:1] == ["messages"] or (parts[:1] == ["models"] and "anthropic-version" in request.headers)


def _allowed_origin(request: web.Request) -> str:
    """What the browser is told; nothing for a page that may not ask."""
    origins, origin = request.app[CONTEXT].served.settings.server.cors_origins, request.headers.get(hdrs.ORIGIN, "")
    return "*" if "*" in origins else origin if origin in origins else ""


def _preflight(request: web.Request) -> web.Response:
    response = web.Response(status=204)
    if _allowed_origin(request):
        response.headers["Access-Control-Allow-Methods"] = "GET, POST, OPTIONS, HEAD"
        response.headers["Access-Control-Allow-Headers"] = request.headers.get("Access-Control-Request-Headers", "*")
        response.headers["Access-Control-Max-Age"] = "600"
    return response


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Headers of every reply, streams included."""
    if NOTE in request:
        response.headers["x-request-id"] = request[NOTE].request_id
        if is_anthropic(request):
            response.headers["request-id"] = request[NOTE].request_id
    if origin := _allowed_origin(request):
        response.headers["Access-Control-Allow-Origin"] = origin
        response.headers["Access-Control-Expose-Headers"] = "x-request-id, request-id, retry-after"
    if request.app[CONTEXT].served.settings.server.cors_origins:
        response.headers["Vary"] = ", ".join(filter(None, (response.headers.get("Vary"), "Origin")))


async def expect(request: web.Request) -> None:
    """Asks for the body of a client that waits for leave (`Expect: 100-continue`) only when it will be read."""
    if request.version < HttpVersion11:
        return
    context = request.app[CONTEXT]
    try:
        context.keys.check(request.headers)
        context.admission.check(request.content_length)
    except RequestError:
        return  # the reply itself is the answer
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # a reply has not begun


def _log(request: web.Request, note: Note, status: int, seconds: float) -> None:
    """name=value, values without blanks. The route as the server knows it: a path that it does not know may hold
    anything."""
    resource = request.match_info.route.resource
    route = resource.canonical if resource is not None else "unknown"
    found = note.generation
    generations = [] if found is None else [found] if isinstance(found, Generation) else found.generations
    request.app[METRICS].ended(route, status, seconds, generations)
    line = f"request={note.request_id} method={request.method[:8]} route={route} status={status} seconds={seconds:.3f}"
    if (generation := note.generation) is not None:
        request.app[CONTEXT].request_times_s.append(seconds)
        usage = generation.usage()
        line += f" answer={generation.prepared.request.request_id} prompt_tokens={usage['prompt_tokens']}"
        line += f" cached_tokens={usage['prompt_cache_hit_tokens']} answer_tokens={usage['completion_tokens']}"
        line += f" ended={_value(generation.ending)}"
    line += f" outcome={_value(note.outcome)}" if note.outcome else ""
    log.info("%s", line + (f" key={note.key[:6]}" if note.key else ""))


def _value(text: str) -> str:
    return text.replace(" ", "_")
