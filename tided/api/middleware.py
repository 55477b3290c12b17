"""Around every request: its id, the key check, faults in the API's shape, one line of log without text."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from aiohttp import HttpVersion11, hdrs, web

from tided.api.context import CONTEXT, NOTE, Note
from tided.api.errors import as_request_error, error_response
from tided.api.ids import request_id
from tided.errors import RequestError

log = logging.getLogger("tided.api")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_OPEN_PATHS = ("/", "/health", "/health/")
_CLIENT_GONE = 499


@web.middleware
async def observe(request: web.Request, handler: Handler) -> web.StreamResponse:
    request[NOTE] = note = Note(request_id(request.headers.get("x-request-id")))
    started_s, status = time.monotonic(), _CLIENT_GONE
    try:
        response = await _answer(request, handler)
        status = response.status
        return response
    except asyncio.CancelledError:
        note.outcome = "client gone"
        raise
    finally:
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
        response = error_response(as_request_error(error), context.retry_after_s())
        if isinstance(error, web.HTTPMethodNotAllowed):
            response.headers["Allow"] = error.headers["Allow"]
        return response


def _is_open(request: web.Request) -> bool:
    return request.path in _OPEN_PATHS and request.method in (hdrs.METH_GET, hdrs.METH_HEAD)


def _preflight(request: web.Request) -> web.Response:
    response = web.Response(status=204)
    if request.app[CONTEXT].keys.open:
        response.headers["Access-Control-Allow-Methods"] = "GET, POST, OPTIONS, HEAD"
        response.headers["Access-Control-Allow-Headers"] = request.headers.get("Access-Control-Request-Headers", "*")
        response.headers["Access-Control-Max-Age"] = "600"
    return response


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Headers of every reply, streams included. Pages of other origins may ask an open server only."""
    if NOTE in request:
        response.headers["x-request-id"] = request[NOTE].request_id
    if request.app[CONTEXT].keys.open:
        response.headers["Access-Control-Allow-Origin"] = "*"
        response.headers["Access-Control-Expose-Headers"] = "x-request-id, request-id, retry-after"


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
    """The route as the server knows it: a path that it does not know may hold anything."""
    resource = request.match_info.route.resource
    route = resource.canonical if resource is not None else "unknown path"
    line = f"{note.request_id} {request.method[:8]} {route} {status} {seconds:.3f} s"
    if (generation := note.generation) is not None:
        request.app[CONTEXT].request_times_s.append(seconds)
        usage = generation.usage()
        line += f" {generation.prepared.request.request_id}"
        line += f" prompt {usage['prompt_tokens']} answer {usage['completion_tokens']} tokens"
        line += f" {generation.ending}"
    log.info("%s", " ".join(filter(None, (line, note.outcome, note.key))))
