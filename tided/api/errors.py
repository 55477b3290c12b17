"""Every refusal in the shape of its API: one line that says what is wrong, never a trace and never a path."""

import logging
import traceback
from typing import Any

from aiohttp import web

from tided.api.json_text import to_json
from tided.chat.text import shorten
from tided.errors import ContextOverflowError, RequestError, TideError

log = logging.getLogger("tided.api")

_HTTP: dict[int, tuple[str, str]] = {
    404: ("not_found", "There is nothing at this path; GET /openapi.json lists what there is."),
    405: ("method_not_allowed", "This path does not take this method"),
    413: ("request_too_large", "The request's body is too large."),
}


def unavailable(what: str) -> RequestError:
    return RequestError(what, status=503, kind="server_error", code="engine_unavailable")


def engine_failed(what: str) -> RequestError:
    return RequestError(what, status=500, kind="server_error", code="engine_error")


class TooLargeError(RequestError):
    """A body, as sent or unfolded, is larger than it may be."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(
            f"The request's body is larger than {limit_bytes} bytes.", status=413, code="request_too_large"
        )


def as_request_error(error: Exception) -> RequestError:
    """The fault as a client may see it. What nobody foresaw is logged by its place, without the values it speaks of."""
    if isinstance(error, RequestError):
        # What is not served is one code for clients, whatever the state behind it.
        return unavailable(str(error)) if error.status == 503 else error
    if isinstance(error, web.HTTPException):
        code, what = _HTTP.get(error.status, (None, error.reason))
        if isinstance(error, web.HTTPMethodNotAllowed):
            what = f"{what}; it takes {error.headers['Allow'].replace(',', ', ')}."
        return RequestError(what, status=error.status, code=code)
    if isinstance(error, TideError):
        return unavailable(error.what)
    frames = "".join(traceback.format_tb(error.__traceback__))
    log.error("unexpected %s while answering:\n%s", type(error).__name__, frames)
    return engine_failed("The server failed while answering this request.")


def error_body(error: RequestError) -> dict[str, Any]:
    message = shorten(error, 1000)
    return {"error": {"message": message, "type": error.kind, "param": error.param, "code": error.code}}


# Anthropic's names of faults, by status; every other fault of a client is an invalid_request_error.
ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error_body(error: RequestError, request_id: str) -> dict[str, Any]:
    kind = ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    message = shorten(_anthropic_message(error), 1000)
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def _anthropic_message(error: RequestError) -> str:
    """Of a prompt that is too long in the words that clients look for: they shorten the conversation then. The
    answer's length was lowered to the room left before, so it is the prompt alone."""
    if not isinstance(error, ContextOverflowError):
        return str(error)
    most = error.context_tokens
    prompt = error.prompt_tokens if error.counted else most + 1
    return f"prompt is too long: {prompt} tokens > {most if prompt > most else most - 1} maximum"


def error_response(error: RequestError, retry_after_s: int, body: dict[str, Any]) -> web.Response:
    response = web.Response(status=error.status, text=to_json(body), content_type="application/json", charset="utf-8")
    if error.status in (429, 503):
        response.headers["x-should-retry"] = "true"
        response.headers["Retry-After"] = str(retry_after_s)
    elif error.status < 500:
        response.headers["x-should-retry"] = "false"
    if error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response
