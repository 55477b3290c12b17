"""The daemon over HTTP, by the standard library: a command answers before a larger client would be imported."""

import http.client
import json
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote, urlsplit

from tided.errors import NotRunningError, PairError, PermissionError_, TideError, UnavailableError, UsageError

CONNECT_S = 5.0
SILENCE_S = 60.0  # an open stream carries a keep-alive comment every few seconds, however long the prompt takes
ANSWER_S = 3600.0  # an answer that is not streamed is silent until it is whole
MAX_LINE_BYTES = 16 << 20
MAX_BODY_BYTES = 256 << 20


class RequestFailed(TideError):
    """The server refused one request; another may succeed."""


def base_url(url: str) -> str:
    """`host:port`, a URL, or one that ends in /v1 -> `http://host:port`."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        valid = parts.scheme in ("http", "https") and parts.hostname and (parts.port or True)
    except ValueError:
        valid = False
    if not valid:
        raise UsageError(f"'{url}' is no address of a server", hint="for example --url http://127.0.0.1:8000")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"


def local_url(host: str, port: int) -> str:
    """The URL by which this machine reaches a server that listens on `host`."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def health(url: str, timeout_s: float = CONNECT_S) -> dict[str, Any]:
    """`/health`, whatever its status code: a daemon that is loading or at fault says so there."""
    with _response(url, "GET", "/health", None, {}, timeout_s) as response:
        body = _json(response.read(MAX_LINE_BYTES))
    return body if isinstance(body, dict) else {}


def context_tokens(url: str, key: str) -> int | None:
    """The most tokens of one request, by the list of models; None for a server that does not say."""
    try:
        with _response(url, "GET", "/v1/models", None, _headers(key), CONNECT_S) as response:
            body = _json(response.read(MAX_LINE_BYTES)) if response.status == 200 else None
    except UnavailableError:
        return None
    cards = body.get("data") if isinstance(body, dict) else None
    card = cards[0] if isinstance(cards, list) and cards and isinstance(cards[0], dict) else {}
    found = card.get("max_model_len") or card.get("context_length")
    return found if isinstance(found, int) else None


def models(url: str, key: str) -> list[str]:
    """Names of the models that a server of OpenAI's API has; none where it does not tell."""
    try:
        with _response(url, "GET", "/v1/models", None, _headers(key), CONNECT_S) as response:
            body = _json(response.read(MAX_LINE_BYTES))
    except TideError:
        return []
    cards = body.get("data") if isinstance(body, dict) else None
    return [str(card["id"]) for card in cards or [] if isinstance(card, dict) and card.get("id")]


def trace(url: str, key: str, request_id: str) -> dict[str, Any]:
    """What became of the experts that a request wanted; `latest`: of the newest that has ended."""
    path = f"/v1/requests/{quote(request_id, safe='')}/residency"
    with _response(url, "GET", path, None, _headers(key), ANSWER_S) as response:
        data = response.read(MAX_BODY_BYTES)
        if response.status == 404:
            raise _unknown_request(url, request_id)
        _raise_for(response.status, data)
    body = _json(data)
    return body if isinstance(body, dict) else {}


def _unknown_request(url: str, request_id: str) -> RequestFailed:
    if request_id == "latest":
        hint = "ask something first, by `tidectl chat` for one"
        return RequestFailed("no request has ended yet, or this is no TideLM server", where=url, hint=hint)
    hint = "the last requests alone are kept; the id is that of the answer (chatcmpl-...)"
    return RequestFailed(f"nothing is known of the request {request_id}", where=url, hint=hint)


def post(url: str, key: str, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON object that a route answers with."""
    with _response(url, "POST", path, body, _headers(key), ANSWER_S) as response:
        data = response.read(MAX_BODY_BYTES)
        _raise_for(response.status, data)
    found = _json(data)
    if not isinstance(found, dict):
        raise RequestFailed(f"{path} did not answer with a JSON object", where=url)
    return found


def answer(url: str, key: str, body: Mapping[str, Any]) -> Any:
    """The JSON of a chat completion that is not streamed."""
    with _response(url, "POST", "/v1/chat/completions", body, _headers(key), ANSWER_S) as response:
        data = response.read(MAX_BODY_BYTES)
        _raise_for(response.status, data)
    return _json(data)


def stream(url: str, key: str, body: Mapping[str, Any]) -> Generator[Any]:
    """The JSON of each chunk of a streamed chat completion. Closing the iterator cancels the request."""
    with _response(url, "POST", "/v1/chat/completions", body, _headers(key), SILENCE_S) as response:
        if response.status != 200:
            _raise_for(response.status, response.read(MAX_LINE_BYTES))
        for data in _events(response, url):
            chunk = _json(data)
            if isinstance(chunk, dict) and (error := chunk.get("error")):
                raise PairError(_message(error), hint="see `tidectl status` and `tidectl logs`")
            yield chunk


def expert_events(url: str, key: str, follow: bool = True) -> Generator[tuple[str, Any]]:
    """Name and data of each event of the expert map: for as long as the server runs, or (`follow` false) those of
    now."""
    path = "/v1/expert-map/events" + ("" if follow else "?follow=0")
    with _response(url, "GET", path, None, _headers(key), SILENCE_S) as response:
        if response.status == 404:
            raise RequestFailed("this server tells nothing of experts: it is no TideLM, or an older one", where=url)
        if response.status != 200:
            _raise_for(response.status, response.read(MAX_LINE_BYTES))
        name = ""
        while line := response.readline(MAX_LINE_BYTES):
            if line.startswith(b"event:"):
                name = line[6:].strip().decode(errors="replace")
            elif line.startswith(b"data:"):
                yield name, _json(line[5:])


def _events(response: http.client.HTTPResponse, url: str) -> Iterator[bytes]:
    """The data of each server-sent event up to [DONE]. A stream that ends before it was cut."""
    while line := response.readline(MAX_LINE_BYTES):
        if line.startswith(b"data:"):
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            yield data
    raise PairError("the answer ended before it was complete", where=url, hint="see `tidectl status`, `tidectl logs`")


@contextmanager
def _response(
    url: str, method: str, path: str, body: Mapping[str, Any] | None, headers: Mapping[str, str], timeout_s: float
) -> Iterator[http.client.HTTPResponse]:
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=CONNECT_S)
    try:
        _connect(connection, url)
        connection.sock.settimeout(timeout_s)
        payload = None if body is None else json.dumps(body).encode()
        connection.request(method, parts.path + path, payload, {"Content-Type": "application/json", **headers})
        yield connection.getresponse()
    except TimeoutError as error:
        raise UnavailableError(f"the server has sent nothing for {timeout_s:g} s", where=url) from error
    except (OSError, http.client.HTTPException) as error:
        raise UnavailableError(f"the connection broke ({error or type(error).__name__})", where=url) from error
    finally:
        connection.close()


def _connect(connection: http.client.HTTPConnection, url: str) -> None:
    try:
        connection.connect()
    except OSError as error:
        hint = "start a profile with `tidectl start PROFILE`, or name the server with --url"
        raise NotRunningError(f"no server answers ({error.strerror or error})", where=url, hint=hint) from error


def _headers(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def _raise_for(status: int, data: bytes) -> None:
    if status == 200:
        return
    body = _json(data)
    text = f"{_message(body.get('error') if isinstance(body, dict) else None)} (status {status})"
    if status in (401, 403):
        raise PermissionError_(text, hint="set TIDE_API_KEY to one of the server's keys")
    if status in (429, 503):
        raise UnavailableError(text, hint="try again in a moment")
    raise RequestFailed(text)


def _message(error: object) -> str:
    message = error.get("message") if isinstance(error, dict) else error
    return str(message) if message else "the server gave no reason"


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return None
