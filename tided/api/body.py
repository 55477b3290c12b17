"""A request's body as a JSON object, within every limit."""

import asyncio
import json
import math
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from tided.api.admission import Place
from tided.api.errors import TooLargeError
from tided.api.slots import SHORT_BYTES
from tided.chat.text import shorten, well_formed
from tided.errors import RequestError

MAX_DEPTH, MAX_DIGITS = 128, 1000

# The parser holds the interpreter while it works, and the loop that sends heartbeats waits for it: so few values take
# a tenth of a second. The longest conversation that `messages` allows holds a third of them.
MOST_VALUES = 300_000

_SLICE_BYTES = 1 << 16
_WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
# Possessive, and whole without its last quote: every byte is looked at once, whatever the body is.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?+', re.DOTALL)
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


async def read_body(request: web.Request, limit_bytes: int, timeout_s: float, place: Place) -> bytearray:
    """The body as it came, compressed or not. Reading stops at the limit. The request keeps no copy of it."""
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for data in request.content.iter_any():
                body += data
                if len(body) > limit_bytes:
                    raise TooLargeError(limit_bytes)
                if len(body) > SHORT_BYTES:
                    place.hold(limit_bytes)
    except TimeoutError:
        raise RequestError("The request's body did not arrive in time.", status=408, kind="timeout_error") from None
    except (HttpProcessingError, web.RequestPayloadError):
        raise RequestError("The request's body cannot be read.") from None
    return body


def decompressed(
    body: bytes | bytearray, encoding: str, limit_bytes: int, alive: Callable[[], None]
) -> bytes | bytearray:
    """`body` without its Content-Encoding. Stops at the limit: what a bomb would become is never in memory. `alive` is
    called between slices and ends the work by raising."""
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return body
    if name not in _WINDOW_BITS:
        raise RequestError(f"Content-Encoding {shorten(name, 40)} is not supported; use gzip or deflate.")
    unpacker = zlib.decompressobj(_WINDOW_BITS[name])
    plain = bytearray()
    try:
        for at in range(0, len(body), _SLICE_BYTES):
            alive()
            plain += unpacker.decompress(body[at : at + _SLICE_BYTES], limit_bytes + 1 - len(plain))
            if len(plain) > limit_bytes:
                raise TooLargeError(limit_bytes)
    except zlib.error:
        raise RequestError(f"The request's body is not {name} data.") from None
    if not unpacker.eof or unpacker.unused_data:
        raise RequestError(f"The request's body is damaged {name} data.")
    return plain


def parse_object(body: bytes | bytearray) -> dict[str, Any]:
    """The JSON object of a body. Unpaired surrogates become U+FFFD; of a key given twice the last value counts."""
    check_values(body)
    try:
        text = body.decode("utf-8")
        value = json.loads(text, parse_constant=_refuse_constant, parse_int=_integer, parse_float=_finite)
    except UnicodeDecodeError:
        raise RequestError("The request's body is not UTF-8.") from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:  # its text tells a place, not a value
        raise RequestError(f"The request's body is not valid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise RequestError("The request's body is not a JSON object.")
    _check_depth(value)
    cleaned = _well_formed(value) if _SURROGATE_ESCAPE.search(text) else value
    return dict(cleaned)


def check_values(body: bytes | bytearray) -> None:
    """Refuses what would take too long to parse. What stands in strings does not count; that it could not be too much
    even if it counted is seen at memory speed."""
    if body.count(b'"') + _openings(body) > MOST_VALUES and count_values(body) > MOST_VALUES:
        raise RequestError(
            f"The request's body holds more than {MOST_VALUES} values.", status=413, code="request_too_large"
        )


def count_values(body: bytes | bytearray) -> int:
    """Strings, commas, arrays and objects: at least as many as there are values. Stops once they are too many."""
    count = at = 0
    for string in _STRING.finditer(body):
        count += 1 + _openings(body[at : string.start()])
        at = string.end()
        if count > MOST_VALUES:
            return count
    return count + _openings(body[at:])


def _openings(text: bytes | bytearray) -> int:
    return text.count(b",") + text.count(b"[") + text.count(b"{")


def _check_depth(value: Any) -> None:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [child for parent in level for child in _containers(parent)]
        if not level:
            return
    raise _too_deep()


def _containers(parent: Any) -> Iterator[Any]:
    children = parent.values() if isinstance(parent, dict) else parent
    return (child for child in children if isinstance(child, (dict, list)))


def _well_formed(value: Any) -> Any:
    if isinstance(value, str):
        return well_formed(value)
    if isinstance(value, list):
        return [_well_formed(entry) for entry in value]
    if isinstance(value, dict):
        return {well_formed(key): _well_formed(entry) for key, entry in value.items()}
    return value


def _too_deep() -> RequestError:
    return RequestError(f"The request's body is nested deeper than {MAX_DEPTH} levels.")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _finite(digits: str) -> float:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    if not math.isfinite(value := float(digits)):
        raise ValueError("a number too large")
    return value
