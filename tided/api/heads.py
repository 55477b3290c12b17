"""Refusals of what never became a request: heads that cannot be read, that come too late, or for which there is no
connection. They have the shape of every other refusal; no path is known, so it is OpenAI's."""

import asyncio
import logging
from http import HTTPStatus

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMethod, InvalidHeader, LineTooLong

from tided.api.context import CONTEXT
from tided.api.errors import engine_failed, error_body, error_response, unavailable
from tided.api.ids import request_id
from tided.api.json_text import to_json
from tided.errors import RequestError


class _Wordless(logging.Filter):
    """What stands in a head that cannot be read may be a key: of an error its kind is logged, and not its words."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info and record.exc_info[0] is not None:
            record.msg, record.args = f"{record.getMessage()}: {record.exc_info[0].__name__}", None
            record.exc_info = None
        return True


log = logging.getLogger("tided.http")
log.addFilter(_Wordless())


_FAULTS: dict[type[BaseException], str] = {
    LineTooLong: "a line of it is longer than 8190 bytes",
    InvalidHeader: "one of its fields is malformed",
    BadHttpMethod: "it does not begin as HTTP/1.1 does (https is not spoken here)",
}
_OTHER = "it is malformed, or has more than 128 fields"


class Handler(web.RequestHandler):
    """aiohttp's handler of a connection. Bodies come as they were sent: unfolding them has its own limits
    (`body.decompressed`)."""

    __slots__ = ()

    def __init__(self, app: web.Application, server: web.Server) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=app[CONTEXT].limits.idle_s,
            access_log=None,  # type: ignore[arg-type]  # none, as the runner takes it
            logger=log,
            auto_decompress=False,
        )

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        super().handle_error(request, status, exc, message)  # logs it; raises where a reply has begun
        error = engine_failed("The server failed while answering this request.")
        if status < HTTPStatus.INTERNAL_SERVER_ERROR:
            what = next((words for kind, words in _FAULTS.items() if isinstance(exc, kind)), _OTHER)
            error = RequestError(f"The head of the request cannot be read: {what}.", status=status)
        response = error_response(error, 1, error_body(error))
        response.headers["x-request-id"] = request_id(None)
        response.force_close()
        return response


def _raw(error: RequestError, *headers: str) -> bytes:
    """A whole reply, after which the connection is closed."""
    body = to_json(error_body(error)).encode()
    lines = [
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}",
        "Content-Type: application/json; charset=utf-8",
        f"Content-Length: {len(body)}",
        "Connection: close",
        *headers,
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


FULL = _raw(
    unavailable("All connections of this server are busy; try again in a moment, or raise server.max_connections."),
    "Retry-After: 1",
    "x-should-retry: true",
)
LATE = _raw(
    RequestError("The head of the request did not come in time.", status=408, kind="timeout_error"),
    "x-should-retry: false",
)
