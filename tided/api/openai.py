"""POST /v1/chat/completions."""

from contextlib import suppress

from aiohttp import web

from tided.api.admission import Place
from tided.api.body import decompressed, read_body
from tided.api.context import CONTEXT, NOTE, Context, Note
from tided.api.errors import TooLargeError, as_request_error, error_body
from tided.api.generation import Generation
from tided.api.json_text import to_json
from tided.api.openai_wire import ChatWire
from tided.api.prepare import Prepared, prepare
from tided.api.slots import SHORT_BYTES, Alive
from tided.api.sse import DONE, EventStream, ReaderStalledError
from tided.chat.deltas import Delta


async def chat_completions(request: web.Request) -> web.StreamResponse:
    context = request.app[CONTEXT]
    with context.admission.place(request.content_length) as place:
        prepared = await _prepare(request, context, place)
        generation = Generation(context.engine, prepared, context.tokenizer, context.limits.keepalive_s)
    request[NOTE].generation = generation
    wire = ChatWire(generation, context.settings.model.served_name, context.fingerprint)
    try:
        if prepared.chat.stream:
            return await _stream(request, context, generation, wire)
        return await _whole(context, generation, wire)
    finally:
        # Also when the client has gone: the handler is cancelled then, wherever it waits.
        generation.close()


async def _prepare(request: web.Request, context: Context, place: Place) -> Prepared:
    limit_bytes = context.settings.server.max_body_bytes
    sent = await read_body(request, limit_bytes, context.limits.body_s, place)
    body, encoding = await _unfolded_if_short(sent, request.headers.get("Content-Encoding", ""), limit_bytes, context)

    def work(alive: Alive) -> Prepared:
        plain = decompressed(body, encoding, limit_bytes, alive)
        return prepare(plain, context.tokenizer, context.settings, context.context_tokens, alive)

    prepared = await context.slots.run(limit_bytes if encoding else len(body), work)
    if request.headers.get("x-engine-stats") == "0":
        return prepared.without_stats()
    return prepared


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


async def _whole(context: Context, generation: Generation, wire: ChatWire) -> web.Response:
    deltas: list[Delta] = []
    while not generation.over:
        deltas += await generation.next(context.limits.keepalive_s) or ()
    return web.Response(text=to_json(wire.reply(deltas)), content_type="application/json", charset="utf-8")


async def _stream(request: web.Request, context: Context, generation: Generation, wire: ChatWire) -> web.StreamResponse:
    stream = EventStream(request, context.limits.stall_s)
    note = request[NOTE]
    try:
        await stream.open()
        await _send_answer(stream, context.limits.keepalive_s, generation, wire, note)
        return await stream.close()
    except (ReaderStalledError, TimeoutError, ConnectionError):
        note.outcome = "reader gone"
        return stream.abort()


async def _send_answer(
    stream: EventStream, keepalive_s: float, generation: Generation, wire: ChatWire, note: Note
) -> None:
    """The status is sent: from here on a fault is an event of the stream."""
    try:
        while not generation.over:
            deltas = await generation.next(max(keepalive_s - stream.silent_s, 0))
            await stream.send([*(wire.begin() if generation.started else ()), *wire.chunks(deltas or ())])
            # Also while the engine works: what it draws may be hidden, or held back until it is clear what it is.
            if stream.silent_s >= keepalive_s:
                await stream.comment("keep-alive")
        await stream.send(wire.end(), DONE)
    except (ReaderStalledError, ConnectionError):
        raise
    except Exception as error:
        shown = as_request_error(error)
        note.outcome = f"error {shown.code or shown.status}"
        await stream.send([error_body(shown)], DONE)
