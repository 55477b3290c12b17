"""Server-sent events over one response: every batch is one write, and a reader that stalls is given up."""

import asyncio
import time
from collections.abc import Iterable
from typing import Any

from aiohttp import web

from tided.api.json_text import to_json

DONE = "data: [DONE]\n\n"


def comment(text: str) -> str:
    return f": {text}\n\n"


def data(values: Iterable[dict[str, Any]]) -> str:
    return "".join(f"data: {to_json(value)}\n\n" for value in values)


def event(value: dict[str, Any]) -> str:
    """An event by the name that its data has as `type`."""
    return f"event: {value['type']}\ndata: {to_json(value)}\n\n"


_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache, no-transform",
    "X-Accel-Buffering": "no",
}


class ReaderStalledError(Exception):
    """The client holds the connection open and does not read."""


class EventStream:
    """`stall_s`: longest wait for a client to take what is written. What it has not taken stays below the socket's
    high-water mark, because every write waits for it."""

    def __init__(self, request: web.Request, stall_s: float) -> None:
        self._request, self._stall_s = request, stall_s
        self._response = web.StreamResponse(headers=_HEADERS)
        self._last_write_s = time.monotonic()

    async def open(self) -> None:
        await self._response.prepare(self._request)
        await self._write(comment("ok"))

    @property
    def silent_s(self) -> float:
        """Seconds since anything was written."""
        return time.monotonic() - self._last_write_s

    async def write(self, text: str) -> None:
        """Whole events in one write; nothing for an empty text."""
        if text:
            await self._write(text)

    async def close(self) -> web.StreamResponse:
        async with asyncio.timeout(self._stall_s):
            await self._response.write_eof()
        return self._response

    def abort(self) -> web.StreamResponse:
        """Drops the connection: nothing that is still buffered will be read."""
        if self._request.transport is not None:
            self._request.transport.abort()
        return self._response

    async def _write(self, text: str) -> None:
        try:
            async with asyncio.timeout(self._stall_s):
                await self._response.write(text.encode())
        except TimeoutError:
            raise ReaderStalledError from None
        self._last_write_s = time.monotonic()
