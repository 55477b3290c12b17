"""POST /v1/messages and /v1/messages/count_tokens."""

from aiohttp import web

from tided.api.anthropic_request import LongPromptError, count_tokens, prepare_message
from tided.api.anthropic_wire import MessageWire
from tided.api.context import CONTEXT, NOTE, Context
from tided.api.exchange import answer_in_pieces, answer_whole, receive
from tided.api.generation import Generation
from tided.api.json_text import to_json
from tided.errors import ContextOverflowError, RequestError


async def messages(request: web.Request) -> web.StreamResponse:
    context, note = request.app[CONTEXT], request[NOTE]
    generation, model = await _submitted(request)
    note.generation = generation
    wire = MessageWire(generation, model, note.request_id)
    try:
        if generation.prepared.chat.stream:
            return await answer_in_pieces(request, context, generation, wire, note)
        return await answer_whole(context, generation, wire)
    finally:
        # Also when the client has gone: the handler is cancelled then, wherever it waits.
        generation.close()


async def _submitted(request: web.Request) -> tuple[Generation, str]:
    """And the name of the model that was asked for. What the answer does not need, images above all, is let go here."""
    context = request.app[CONTEXT]
    with context.admission.place(request.content_length) as place:
        try:
            message = await receive(request, context, place, prepare_message)
        except LongPromptError as error:
            raise await _with_images(error, context) from None
        prepared = await context.images.seen(message.prepared)
        generation = Generation(context.engine, prepared, context.served, context.limits.keepalive_s)
    return generation, message.model


async def _with_images(error: LongPromptError, context: Context) -> ContextOverflowError:
    try:
        images = await context.images.tokens(error.images)
    except RequestError:  # that the prompt is too long goes first, and is so without them
        return error
    tokens = error.prompt_tokens - len(error.images) + images
    return ContextOverflowError(error.context_tokens, tokens, error.max_tokens)


async def count(request: web.Request) -> web.Response:
    """Needs no lane, and answers while all are busy."""
    context = request.app[CONTEXT]
    with context.admission.desk(request.content_length) as place:
        counted = await receive(request, context, place, count_tokens)
        tokens = counted.tokens - len(counted.images) + await context.images.tokens(counted.images)
    return web.Response(text=to_json({"input_tokens": tokens}), content_type="application/json", charset="utf-8")
