"""From a body to an answer on the wire, whatever API it speaks: one way in, one loop out, a writer for each API."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, TypeVar

from aiohttp import web

from tided.api.admission import Place
from tided.api.body import decompressed, read_body
from tided.api.context import NOTE, Context, Note
from tided.api.errors import TooLargeError, as_request_error
from tided.api.json_text import to_json
from tided.api.served import ServedModel
from tided.api.slots import SHORT_BYTES, Alive
from tided.api.sse import EventStream, ReaderStalledError
from tided.errors import RequestError

MOST_AT_ONCE = 5_000
"""Log probabilities that the loop itself writes, in some 25 ms; a reply of more is written by a thread beside it."""

T = TypeVar("T")
P = TypeVar("P")
P_co = TypeVar("P_co", covariant=True)
P_contra = TypeVar("P_contra", contravariant=True)


class Running(Protocol[P_co]):
    """An answer under way, or several (`Generation`, `Answers`), and its pieces."""

    @property
    def started(self) -> bool: ...

    @property
    def over(self) -> bool: ...

    @property
    def prompt_logprobs(self) -> int:
        """Log probabilities that the reply tells of prompts."""
        ...

    @property
    def answer_logprobs(self) -> int:
        """Of answers, those that wait to be told."""
        ...

    async def next(self, timeout_s: float) -> Sequence[P_co] | None:
        """The next pieces, possibly none; None when nothing came in time. Raises the engine's fault."""
        ...


class Writer(Protocol[P_contra]):
    """How an API shows one answer: the text of a stream's events, or the whole reply."""

    def begin(self) -> str:
        """Once, when the request has a lane; nothing on later calls."""
        ...

    def pieces(self, deltas: Sequence[P_contra]) -> str: ...

    def silence(self) -> str:
        """What says that the server lives while there is nothing to say."""
        ...

    def end(self) -> str: ...

    def fault(self, error: RequestError) -> str:
        """The status is sent: a fault is the last event."""
        ...

    def reply(self, deltas: Sequence[P_contra]) -> dict[str, Any]: ...


async def receive(
    request: web.Request, context: Context, place: Place, work: Callable[[bytes | bytearray, ServedModel, Alive], T]
) -> T:
    """What `work` makes of the request's body, in a thread. Raises RequestError for all that can be refused."""
    served = context.served_to(request[NOTE])
    limit_bytes = context.served.settings.server.max_body_bytes
    sent = await read_body(request, limit_bytes, context.limits.body_s, place)
    body, encoding = await _unfolded_if_short(sent, request.headers.get("Content-Encoding", ""), limit_bytes, context)
    size_bytes = limit_bytes if encoding else len(body)
    return await context.slots.run(
        size_bytes, lambda alive: work(decompressed(body, encoding, limit_bytes, alive), served, alive)
    )


async def _unfolded_if_short(
    body: bytearray, encoding: str, limit_bytes: int, context: Context
) -> tuple[bytes | bytearray, str]:
    """The body, and the encoding it still has. How long a folded body is shows only when it is unfolded: one that does
    not stay short is left for the thread of the long ones, so that no two of them are unfolded at once."""
    if encoding and len(body) <= SHORT_BYTES < limit_bytes:
        with suppress(TooLargeError):
            plain = await context.slots.run(len(body), lambda alive: decompressed(body, encoding, SHORT_BYTES, alive))
            return plain, ""
    return body, encoding


async def answer_whole(context: Context, generation: Running[P], writer: Writer[P]) -> web.Response:
    deltas: list[P] = []
    while not generation.over:
        deltas += await generation.next(context.limits.keepalive_s) or ()
    body = await _written(context, generation, lambda: to_json(writer.reply(deltas)).encode())
    return web.Response(body=body, content_type="application/json", charset="utf-8")


async def _written(context: Context, generation: Running[P], write: Callable[[], T]) -> T:
    """The loop answers peers and the service manager: what takes seconds to write would be taken for a hang."""
    logprobs = generation.prompt_logprobs + generation.answer_logprobs
    return write() if logprobs <= MOST_AT_ONCE else await context.slots.write(write)


async def answer_in_pieces(
    request: web.Request, context: Context, generation: Running[P], writer: Writer[P], note: Note
) -> web.StreamResponse:
    stream = EventStream(request, context.limits.stall_s)
    try:
        await stream.open()
        await _send_answer(stream, context, generation, writer, note)
        return await stream.close()
    except (ReaderStalledError, TimeoutError, ConnectionError):
        note.outcome = "reader gone"
        return stream.abort()


async def _send_answer(
    stream: EventStream, context: Context, generation: Running[P], writer: Writer[P], note: Note
) -> None:
    """The status is sent: from here on a fault is an event of the stream."""
    keepalive_s = context.limits.keepalive_s

    try:
        while not generation.over:
            deltas = await generation.next(max(keepalive_s - stream.silent_s, 0))
            await stream.write(await _written(context, generation, partial(_begun, generation, writer, deltas or ())))
            # Also while the engine works: what it draws may be hidden, or held back until it is clear what it is.
            if stream.silent_s >= keepalive_s:
                await stream.write(writer.silence())
        await stream.write(await _written(context, generation, writer.end))
    except (ReaderStalledError, ConnectionError):
        raise
    except Exception as error:
        shown = as_request_error(error)
        note.outcome = f"error {shown.code or shown.status}"
        await stream.write(writer.fault(shown))


def _begun(generation: Running[P], writer: Writer[P], deltas: Sequence[P]) -> str:
    return (writer.begin() if generation.started else "") + writer.pieces(deltas)
